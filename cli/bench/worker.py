"""`python -m tokenpod.cli.bench.worker`: one client process, which does what its pipe says.

The pipe is read and written between levels, and for short reports of progress, so a blocking one
does. The event loop lives on between levels, and the connections with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
from multiprocessing.connection import Connection

import uvloop

from tokenpod.cli.bench.client import LevelRun, Stubs
from tokenpod.cli.bench.messages import Begin, Outcome, Plan, Progress
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub


def serve(pipe: Connection) -> None:
    """Work through the plan that comes first; `messages` says what follows. Raises EOFError."""

    def answer(message: Progress | Outcome) -> None:
        try:
            pipe.send(message)
        except ConnectionError:
            # The command is gone, and a load that nobody measures must not go on.
            os._exit(1)

    plan: Plan = pipe.recv()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        channels = contextlib.AsyncExitStack()
        stubs = runner.run(_connect(plan, channels))
        try:
            while True:
                begin: Begin = pipe.recv()
                run = LevelRun(plan, begin, stubs)
                # The collector would stop the clock now and then to look at requests that live on.
                gc.collect()
                gc.freeze()
                answer(Progress())
                answer(runner.run(run.run(pipe.recv(), answer)))
        finally:
            runner.run(channels.aclose())


async def _connect(plan: Plan, channels: contextlib.AsyncExitStack) -> Stubs:
    async def stub(index: int) -> TextGenerationServiceStub:
        # Channels to one address would use one connection otherwise.
        channel = plan.remotes[index].open(("grpc.use_local_subchannel_pool", 1))
        return TextGenerationServiceStub(await channels.enter_async_context(channel))

    connections = range(plan.options.connections)
    return [[await stub(index) for _ in connections] for index in range(len(plan.remotes))]


if __name__ == "__main__":
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(sys.stdin.fileno()))
