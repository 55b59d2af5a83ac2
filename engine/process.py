"""The engine as a process of its own: `python -m tokenpod.engine.process FD...`.

It is started by the service, talks over the inherited sockets alone (one a front end), and ends
when the first of them closes. As a rank of a group it has a line to the service besides, and ends
when the group does.
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
from typing import NoReturn

import torch

from tokenpod.engine.assemble import Assembled, EngineError, assemble
from tokenpod.engine.exchange import Face, face_of
from tokenpod.engine.executor import Executor
from tokenpod.engine.group import Group, join_group
from tokenpod.engine.link import LinkClosed
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.memory import let_segments_grow
from tokenpod.engine.parent import die_with_parent
from tokenpod.engine.shards.member import Member
from tokenpod.engine.types import Broken, EngineOptions, Loading, Ready
from tokenpod.models.load import ModelError, load_model
from tokenpod.models.share import WHOLE, Share
from tokenpod.scheduler.scheduler import Limits, Scheduler


def main() -> int:
    """Serve the links until the first closes."""
    die_with_parent()
    # The service decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = face_of([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
    member: Member | None = None
    try:
        options = link.receive(None)[0]
        assert isinstance(options, EngineOptions), "the first message is EngineOptions"
        if options.placement is not None:
            member = Member(options)
        run(options, link, member)
    except LinkClosed:
        if member is not None:
            member.leave()
        return 0
    except (EngineError, ModelError) as error:
        if member is not None:
            member.fail(str(error), fault=True)
        link.send(Broken(str(error)))
    except BaseException as error:
        line = f"the engine failed: {type(error).__name__}"
        if member is not None:
            member.fail(line, fault=False)
        traceback.print_exc()
        with contextlib.suppress(LinkClosed):
            link.send(Broken(line))
    return 1


def run(options: EngineOptions, link: Face, member: Member | None) -> None:
    """Load, say so, and take steps until the link closes (raises LinkClosed) or the group ends.

    Raises EngineError or ModelError with one line that says what is wrong.
    """
    assembled, ready, limits = load(options, link, member)
    if member is not None:
        member.come_up(ready.slots)
    link.send(ready)
    # What lives now lives for ever: spare the collector the walk.
    gc.collect()
    gc.freeze()
    if member is not None and not member.leads:
        follow(member, assembled.executor)
    launcher = member.leading(assembled.executor) if member else assembled.executor
    EngineLoop(link, Scheduler(limits), launcher, overlap=assembled.overlap).run()


def follow(member: Member, executor: Executor) -> NoReturn:
    """Take every step that the leader plans, one ahead of the step that is waited for.

    Raises EngineError when the group is over.
    """
    flying = None
    for plan in member.plans():
        launched = executor.launch(plan)
        if flying is not None:
            flying.wait()
        flying = launched
    raise AssertionError("plans end with an error")


def load(
    options: EngineOptions, link: Face, member: Member | None
) -> tuple[Assembled, Ready, Limits]:
    """Meet the other ranks, load the model or this rank's share, make the pool, warm up.

    Raises EngineError or ModelError with one line that says what is wrong.
    """
    # The front end needs a core of its own: whatever else runs on a core of a parallel region holds
    # up all of them at its end.
    torch.set_num_threads(options.threads or max(len(os.sched_getaffinity(0)) - 1, 1))
    device = torch.device(options.device)
    if device.type == "cuda":
        _take_gpu(device)
    group = _join(member, device) if member else None
    share = Share(group.rank, group.world) if group else WHOLE
    began = time.monotonic()
    reported = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if done == total or now - reported > 0.1:
            reported = now
            link.send(Loading(done, total))

    dtype: torch.dtype | None = getattr(torch, options.dtype) if options.dtype else None
    model = load_model(
        Path(options.model_folder),
        dtype=dtype,
        device=device,
        progress=progress,
        share=share,
        group=group,
    )
    config = model.config
    loaded = time.monotonic()
    positions = min(options.max_total_tokens or config.max_positions, config.max_positions)
    assembled = assemble(model, options, positions=positions, device=device, group=group)
    limits = Limits(
        slots=assembled.slots,
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
        slots=assembled.slots,
        parameters=model.parameters_count,
        weight_bytes=model.weight_bytes,
        load_seconds=loaded - began,
        warmup_seconds=time.monotonic() - loaded,
    )
    return assembled, ready, limits


def _take_gpu(device: torch.device) -> None:
    """Work on this GPU alone. Raises EngineError if there is none of that number."""
    if (index := device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"rank {index} of this pod needs a GPU of its own: there are"
            f" {torch.cuda.device_count()} (--num-shard)"
        )
    torch.cuda.set_device(device)
    let_segments_grow()


def _join(member: Member, device: torch.device) -> Group:
    place = member.placement
    port = member.meet()
    return join_group(
        place.rank, place.world, place.meeting, port, device=device, timeout=place.timeout
    )


if __name__ == "__main__":
    sys.exit(main())
