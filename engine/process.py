"""The engine as a process of its own: `python -m tokenpod.engine.process FD...`.

It is started by the service, talks over the inherited sockets alone (one a front end), and ends
when the first of them closes.
"""

from __future__ import annotations

import contextlib
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
from tokenpod.engine.device_check import check_device, check_heads
from tokenpod.engine.exchange import Face, face_of
from tokenpod.engine.link import LinkClosed
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.engine.parent import die_with_parent
from tokenpod.engine.types import Broken, EngineOptions, Loading, Ready
from tokenpod.models.load import ModelError, load_model, read_config
from tokenpod.scheduler.scheduler import Limits, Scheduler


def main() -> int:
    """Serve the links until the first closes."""
    die_with_parent()
    # The service decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = face_of([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
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


def start_engine(options: EngineOptions, link: Face) -> tuple[EngineLoop, Ready]:
    """Load the model, size and make the pool, warm up.

    Raises EngineError or ModelError with one line that says what is wrong.
    """
    # The front end needs a core of its own: whatever else runs on a core of a parallel region holds
    # up all of them at its end.
    torch.set_num_threads(options.threads or max(len(os.sched_getaffinity(0)) - 1, 1))
    device = torch.device(options.device)
    check_device(device)
    if device.type == "cuda":
        let_segments_grow()
        config = read_config(Path(options.model_folder))
        check_heads(config.heads, config.kv_heads, config.head_dim)
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
        kv_cache_dtype=str(assembled.kv_dtype).removeprefix("torch."),
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


if __name__ == "__main__":
    sys.exit(main())
