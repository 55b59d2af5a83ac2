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

import torch

from tokenpod.engine.assemble import EngineError, assemble
from tokenpod.engine.link import Link, LinkClosed
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.engine.types import Broken, EngineOptions, Loading, Ready, ToEngine
from tokenpod.models.load import ModelError, load_model
from tokenpod.scheduler.scheduler import Limits, Scheduler

_PR_SET_PDEATHSIG = 1


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
    if device.type == "cuda":
        let_segments_grow()
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
    assembled = assemble(model, options, positions=positions, device=device)
    slots = assembled.slots
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
    loop = EngineLoop(link, Scheduler(limits), assembled.executor, overlap=assembled.overlap)
    return loop, ready


def _die_with_parent() -> None:
    """Be killed when the service is, even by SIGKILL: no orphan keeps a GPU busy."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
