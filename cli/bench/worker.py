"""`python -m tokenpod.cli.bench.worker`: one client process, which does what its pipes say.

The pipes are read and written between levels and in small messages only, so blocking ones do. The
event loop lives on between levels, and the connections with it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from contextlib import AsyncExitStack

import uvloop

from tokenpod.cli.bench.client import LevelRun, Stubs
from tokenpod.cli.bench.messages import (
    LENGTH_BYTES,
    Begin,
    Go,
    Message,
    Plan,
    Progress,
    decode,
    encode,
)
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub


def serve() -> None:
    """Work through one plan, which comes on standard input; answers go to standard output."""
    plan = _read()
    if not isinstance(plan, Plan):
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        channels = AsyncExitStack()
        stubs = runner.run(_connect(plan, channels))
        while isinstance(begin := _read(), Begin):
            run = LevelRun(plan, begin, stubs)
            # The collector would stop the clock now and then to look at requests that live on.
            gc.collect()
            gc.freeze()
            _write(Progress())
            if isinstance(go := _read(), Go):
                _write(runner.run(run.run(go.at, _write)))
        runner.run(channels.aclose())


async def _connect(plan: Plan, channels: AsyncExitStack) -> Stubs:
    async def stub(index: int) -> TextGenerationServiceStub:
        # Channels to one address would use one connection otherwise.
        channel = plan.remotes[index].open(("grpc.use_local_subchannel_pool", 1))
        return TextGenerationServiceStub(await channels.enter_async_context(channel))

    connections = range(plan.options.connections)
    return [[await stub(index) for _ in connections] for index in range(len(plan.remotes))]


def _read() -> Message | None:
    """The next message; None when the pipe has ended."""
    length = int.from_bytes(sys.stdin.buffer.read(LENGTH_BYTES))
    return decode(sys.stdin.buffer.read(length)) if length else None


def _write(message: Message) -> None:
    try:
        sys.stdout.buffer.write(encode(message))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The command is gone, and a load that nobody measures must not go on.
        os._exit(1)


if __name__ == "__main__":
    # Ctrl-C reaches the whole group; the command is the one that ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve()
