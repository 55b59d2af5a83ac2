"""The engine as a process of its own: `python -m tokenpod.engine.process FD`.

It is started by the service, talks over the inherited socket FD alone, and ends when that closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from tokenpod.engine.executor import Executor
from tokenpod.engine.link import Link, LinkClosed
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import choose_slots
from tokenpod.engine.plan import NewRow, RowWork, StepPlan
from tokenpod.engine.pool import KVPool
from tokenpod.engine.types import Broken, EngineOptions, Loading, Ready, SamplingParams, ToEngine
from tokenpod.models.load import ModelError, load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

_PR_SET_PDEATHSIG = 1


class EngineError(Exception):
    """The engine cannot start; the text is one line for the operator."""


def main() -> int:
    """Serve one link until it closes."""
    _die_with_parent()
    # The service decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = Link[ToEngine](socket.socket(fileno=int(sys.argv[1])), ToEngine)  # type: ignore[arg-type]
    try:
        options = link.receive(None)[0]
        assert isinstance(options, EngineOptions), "the first message is EngineOptions"
        try:
            loop, ready = start_engine(options, link)
        except (EngineError, ModelError) as error:
            link.send(Broken(str(error)))
            return 1
        link.send(ready)
        # What lives now lives for ever: spare the collector the walk.
        gc.collect()
        gc.freeze()
        loop.run()
    except LinkClosed:
        return 0
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(LinkClosed):
            link.send(Broken(f"the engine failed: {type(error).__name__}"))
        return 1
    return 0


def start_engine(options: EngineOptions, link: Link[ToEngine]) -> tuple[EngineLoop, Ready]:
    """Load the model, size and make the pool, warm up.

    Raises EngineError or ModelError with one line that says what is wrong.
    """
    # The front end needs a core of its own: whatever else runs on a core of a parallel region holds
    # up all of them at its end.
    torch.set_num_threads(options.threads or max(len(os.sched_getaffinity(0)) - 1, 1))
    device = torch.device(options.device)
    began = time.monotonic()
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if done == total or now - reported > 0.1:
            reported = now
            link.send(Loading(done, total))

    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    model = load_model(Path(options.model_folder), dtype=dtype, device=device, progress=progress)
    config = model.config
    loaded = time.monotonic()
    positions = min(options.max_total_tokens or config.max_positions, config.max_positions)
    slot_bytes = KVPool.bytes_per_slot(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
    )
    slots = choose_slots(
        slot_bytes=slot_bytes,
        wanted=options.max_batch_total_tokens,
        most_useful=options.max_batch_size * positions,
        fraction=options.memory_fraction,
        device=device,
    )
    if slots is None:
        raise EngineError(
            f"max_batch_total_tokens is {options.max_batch_total_tokens}: its "
            f"{(options.max_batch_total_tokens or 0) * slot_bytes / 2**30:.1f} GiB of keys and "
            f"values do not fit into {options.memory_fraction:.0%} of the free memory"
        )
    pool = KVPool(
        layers=config.layers,
        slots=slots,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=device,
    )
    executor = Executor(
        model,
        pool,
        rows=options.max_batch_size,
        max_positions=positions,
        vocab_size=config.vocab_size,
        device=device,
    )
    warm_up(executor, prompt_tokens=min(options.max_batch_prefill_tokens, slots, positions, 64))
    limits = Limits(
        slots=slots,
        max_rows=options.max_batch_size,
        max_positions=positions,
        prefill_tokens=options.max_batch_prefill_tokens,
    )
    ready = Ready(
        dtype=str(model.dtype).removeprefix("torch."),
        device_type=device.type,
        attention="contiguous" if device.type == "cpu" else "paged",
        window_size=config.sliding_window,
        vocab_size=config.vocab_size,
        max_positions=positions,
        slots=slots,
        parameters=model.parameters_count,
        weight_bytes=model.weight_bytes,
        load_seconds=loaded - began,
        warmup_seconds=time.monotonic() - loaded,
    )
    return EngineLoop(link, Scheduler(limits), executor), ready


def warm_up(executor: Executor, *, prompt_tokens: int) -> None:
    """Run one prompt and two decode steps, so that no first request pays for first calls."""
    row = NewRow(
        row=0,
        prefix_slots=np.empty(0, np.int64),
        prompt=[0] * prompt_tokens,
        sampling=SamplingParams(do_sample=True, temperature=0.9, top_k=10, top_p=0.9, seed=1),
        stream=0,
        min_new_tokens=0,
        eos_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        logprobs=True,
        top_n_tokens=2,
    )
    slots = np.arange(prompt_tokens, dtype=np.int64)
    n = max(prompt_tokens - 2, 1)
    prompt = RowWork(0, 0, slots[:n], row.prompt[:n], samples=True, output_index=0)
    executor.launch(StepPlan(0, freed=[], fresh=[row], works=[prompt])).wait()
    for at in range(n, prompt_tokens):
        decode = RowWork(0, at, slots[at : at + 1], None, samples=True, output_index=at - n + 1)
        executor.launch(StepPlan(0, freed=[], fresh=[], works=[decode])).wait()
    executor.release([0])


def _die_with_parent() -> None:
    """Be killed when the service is, even by SIGKILL: no orphan keeps a GPU busy."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
