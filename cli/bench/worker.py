"""`python -m tokenpod.cli.bench.worker`: one client process, told what to do over its pipes.

The pipes are read and written between levels and in small frames only, so blocking ones do. The
event loop lives on between levels, and the connections with it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import BinaryIO

import uvloop

from tokenpod.cli.bench.arrivals import share
from tokenpod.cli.bench.client import LevelRun
from tokenpod.cli.bench.messages import (
    Answer,
    Go,
    Level,
    Outcome,
    Plan,
    Progress,
    Ready,
    Target,
    frame,
    read_request,
)
from tokenpod.cli.remote import Remote
from tokenpod.protos.generate.v3.generate_pb2_grpc import TextGenerationServiceStub

#: Seconds between two reports of progress.
_PROGRESS_SECONDS = 0.2


class Worker:
    """Answers to `requests` on `answers` until the former end."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers

    def serve(self) -> None:
        """Work through one plan."""
        plan = read_request(self._requests)
        if not isinstance(plan, Plan):
            return
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            channels = AsyncExitStack()
            stubs = runner.run(_connect(plan.target, channels))
            while isinstance(level := read_request(self._requests), Level):
                self._level(runner, plan, level, stubs)
            runner.run(channels.aclose())

    def _level(
        self,
        runner: asyncio.Runner,
        plan: Plan,
        level: Level,
        stubs: list[list[TextGenerationServiceStub]],
    ) -> None:
        own = share(level.load, plan.process, plan.processes)
        metadata = _remotes(plan.target)[0].metadata
        run = LevelRun(plan, level, own, stubs, metadata) if own else None
        # The collector would stop the clock now and then to look at requests that live on anyway.
        gc.collect()
        gc.freeze()
        self._answer(Ready())
        go = read_request(self._requests)
        if not isinstance(go, Go):
            return
        if run is None:
            self._answer(Outcome([], 0.0, 0.0, []))
            return
        cpu_before = time.process_time()
        runner.run(self._observed(run, go.at))
        cpu = time.process_time() - cpu_before
        wall = time.monotonic() - go.at
        self._answer(Outcome(run.records, cpu, wall, run.lags))

    async def _observed(self, run: LevelRun, at: float) -> None:
        reports = asyncio.create_task(self._report(run))
        try:
            await run.run(at)
        finally:
            reports.cancel()

    async def _report(self, run: LevelRun) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._answer(Progress(len(run.records), run.failed))

    def _answer(self, message: Answer) -> None:
        try:
            self._answers.write(frame(message))
            self._answers.flush()
        except BrokenPipeError:
            # The command is gone, and a load that nobody measures must not go on.
            os._exit(1)


async def _connect(
    target: Target, channels: AsyncExitStack
) -> list[list[TextGenerationServiceStub]]:
    """Stubs by address, one for each connection."""
    stubs: list[list[TextGenerationServiceStub]] = []
    for remote in _remotes(target):
        row = []
        for _ in range(target.connections):
            # Channels to one address would share their connection otherwise.
            channel = remote.open(("grpc.use_local_subchannel_pool", 1))
            row.append(TextGenerationServiceStub(await channels.enter_async_context(channel)))
        stubs.append(row)
    return stubs


def _remotes(target: Target) -> list[Remote]:
    files = [Path(path) if path else None for path in (target.ca, target.cert, target.key)]
    return [Remote(address, target.token, target.tls, *files) for address in target.addresses]


def main() -> None:
    """Serve on standard input and output."""
    # Ctrl-C reaches the whole group; the command is the one that ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker(sys.stdin.buffer, sys.stdout.buffer).serve()


if __name__ == "__main__":
    main()
