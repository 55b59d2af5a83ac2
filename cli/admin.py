"""What operators do with a pod that runs: `top`, `log-level`, `stacks` and `profile`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from tokenpod_client.cli.connection import Remote
from tokenpod_client.cli.remote import calling
from tokenpod_client.cli.terminal import table
from tokenpod_client.protos.tokenpod.admin.v1 import admin_service_pb2 as pb
from tokenpod_client.protos.tokenpod.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service_pb

#: Moves to the first line and clears what is below.
_TOP = "\033[H\033[J"
_MEBIBYTE = 1 << 20


@asynccontextmanager
async def _asking(remote: Remote) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """The stub and a call's options. What fails within becomes a RemoteError."""
    async with calling(remote) as channel:
        options = {"timeout": remote.deadline, "metadata": remote.metadata}
        yield AdminServiceStub(channel), options


async def top(remote: Remote, *, every: float, count: int | None) -> None:
    """Show what the pod does, again and again: on a terminal in its place, else block by block.

    Args:
        every: seconds between two looks.
        count: looks; None: until it is interrupted.
    """
    live, before, shown = sys.stdout.isatty(), None, 0
    async with _asking(remote) as (stub, options):
        while True:
            now = await stub.GetStatus(pb.GetStatusRequest(), **options)
            text = table(status_rows(now, before))
            print(f"{_TOP}{text}" if live else f"{text}\n", flush=True)
            before, shown = now, shown + 1
            if count is not None and shown >= count:
                return
            await asyncio.sleep(every)


async def log_level(remote: Remote, level: str) -> None:
    """Log less or more from now on; print what was logged before."""
    request = pb.SetLogLevelRequest(level=pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}"))
    async with _asking(remote) as (stub, options):
        answer = await stub.SetLogLevel(request, **options)
    print(f"{_level(answer.previous_level)} -> {level}")


async def stacks(remote: Remote, process: str) -> None:
    """Print what threads do."""
    async with _asking(remote) as (stub, options):
        answer = await stub.DumpStacks(pb.DumpStacksRequest(process=process), **options)
    for each in answer.processes:
        print(f"=== {each.process}: {each.stacks}")


async def profile(remote: Remote, process: str, seconds: int) -> None:
    """Print where a process spends its time, as flame graphs are made of."""
    request = pb.TakeProfileRequest(process=process, seconds=seconds)
    async with _asking(remote) as (stub, options):
        answer = await stub.TakeProfile(request, **options)
    print(f"{answer.process} for {seconds} s", file=sys.stderr)
    print(answer.folded_stacks, end="")


def status_rows(
    now: pb.GetStatusResponse, before: pb.GetStatusResponse | None
) -> Iterator[tuple[str, str]]:
    """What `top` shows: names and values. Rates are since the look before; without one, unknown."""
    load, counts, old = now.load, _counts(now), _counts(before or now)
    grown = {name: count - old.get(name, 0) for name, count in counts.items()}
    state = "ready" if now.ready else "takes no calls"
    yield "model", f"{now.model or '-'}; {state}{', the engine is stuck' if now.stalled else ''}"
    yield "requests", f"{load.request_count}; {load.running_sequence_count} sequences run"
    yield "queue", f"{load.waiting_sequence_count} sequences, {load.waiting_token_count} tokens"
    yield "KV cache", _cache(load)
    yield "preempted", f"{load.preemption_count}; {load.swapped_sequence_count} in host memory"
    yield (
        "steps/s",
        f"{_part(grown, 'steps', 'seconds')}; engine busy {_share(grown, 'busy', 'seconds')}",
    )
    yield "rows per step", _part(grown, "rows", "steps")
    prompts, cached = _part(grown, "prompt", "seconds"), _share(grown, "cached", "prompt")
    yield "prompt tokens/s", f"{prompts}; cached {cached}"
    yield "output tokens/s", _part(grown, "generated", "seconds")
    for call in now.calls:
        yield f"{call.status}/s", f"{_part(grown, call.status, 'seconds')}; {call.count} in all"
    held = f"{now.call_bytes / _MEBIBYTE:.0f} of {now.max_call_bytes / _MEBIBYTE:.0f} MiB"
    yield "memory of calls", held
    yield "log level", _level(now.log_level)


def _counts(status: pb.GetStatusResponse) -> dict[str, float]:
    """What only grows, by a name of ours, and the time."""
    load = status.load
    return {
        "seconds": status.time.ToNanoseconds() / 1e9,
        "steps": status.step_count,
        "busy": status.step_time_ms / 1000,
        "rows": status.step_row_count,
        "generated": status.generated_token_count,
        "prompt": load.prompt_token_count,
        "cached": load.cached_token_count,
        **{call.status: call.count for call in status.calls},
    }


def _part(grown: dict[str, float], name: str, per: str) -> str:
    return f"{grown[name] / grown[per]:,.1f}" if grown[per] > 0 else "-"


def _share(grown: dict[str, float], name: str, per: str) -> str:
    return f"{grown[name] / grown[per]:.0%}" if grown[per] > 0 else "-"


def _cache(load: service_pb.GetLoadResponse) -> str:
    used, every = load.used_token_count, load.total_token_count
    share = f" ({used / every:.0%})" if every else ""
    return f"{used:,} of {every:,} tokens{share}; evictable {load.evictable_token_count:,}"


def _level(level: pb.LogLevel.ValueType) -> str:
    return pb.LogLevel.Name(level).removeprefix("LOG_LEVEL_").lower()
