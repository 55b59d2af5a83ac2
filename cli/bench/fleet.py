"""The worker processes of one command, and one level's outcome from all of them."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tokenpod.cli.bench.figures import Measured
from tokenpod.cli.bench.messages import (
    LENGTH_BYTES,
    Begin,
    Go,
    Level,
    Message,
    Outcome,
    Plan,
    Progress,
    decode,
    encode,
)
from tokenpod.cli.remote import RemoteError

#: Seconds from `Go` to the start: enough for it to reach every worker.
_HEAD_START = 0.05


@asynccontextmanager
async def fleet(plan: Plan) -> AsyncIterator[Fleet]:
    """Worker processes for a plan; gone when the block is left."""
    workers: list[Process] = []
    try:
        for _ in range(plan.options.processes):
            # -P: nothing is imported from the working directory.
            command = [sys.executable, "-P", "-m", "tokenpod.cli.bench.worker"]
            # A group of its own: Ctrl-C ends the command, also while a worker starts.
            worker = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, process_group=0
            )
            workers.append(worker)
            await _send(worker, plan)
        yield Fleet(plan, workers)
        for worker in workers:
            if worker.stdin:
                worker.stdin.close()
    except BaseException:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
        raise
    finally:
        for worker in workers:
            await worker.wait()


class Fleet:
    """Runs levels on its workers. Made by `fleet`."""

    def __init__(self, plan: Plan, workers: list[Process]) -> None:
        self._plan, self._workers = plan, workers

    async def run(self, level: Level, on_progress: Callable[[int, int], None]) -> Measured:
        """Run one level to its end.

        Args:
            on_progress: called with how many requests have ended and how many of them failed.

        Raises RemoteError if a worker ends.
        """
        parts = divide(level, len(self._workers))
        workers = self._workers[: len(parts)]
        for worker, begin in zip(workers, parts, strict=True):
            await _send(worker, begin)
        await asyncio.gather(*map(self._receive, workers))
        start = Go(time.monotonic() + _HEAD_START)
        for worker in workers:
            await _send(worker, start)
        latest = {worker: Progress() for worker in workers}

        async def outcome(worker: Process) -> Outcome:
            while not isinstance(answer := await self._receive(worker), Outcome):
                assert isinstance(answer, Progress), f"a worker says {answer!r}"
                latest[worker] = answer
                ended = sum(each.ended for each in latest.values())
                on_progress(ended, sum(each.failed for each in latest.values()))
            return answer

        return Measured(self._plan, level, await asyncio.gather(*map(outcome, workers)))

    async def _receive(self, worker: Process) -> Message:
        pipe = worker.stdout
        assert pipe is not None
        try:
            length = int.from_bytes(await pipe.readexactly(LENGTH_BYTES))
            return decode(await pipe.readexactly(length))
        except asyncio.IncompleteReadError as error:
            number, status = self._workers.index(worker), await worker.wait()
            raise RemoteError(f"client process {number} ended with status {status}") from error


async def _send(worker: Process, message: Message) -> None:
    assert worker.stdin is not None
    worker.stdin.write(encode(message))
    try:
        await worker.stdin.drain()
    except ConnectionError as error:
        raise RemoteError(f"a client process ended with status {await worker.wait()}") from error


def divide(level: Level, processes: int) -> list[Begin]:
    """What the first processes begin, together all requests; the other processes have none."""
    slots = level.load.concurrency
    if slots is None:
        return [Begin(level, process, processes) for process in range(processes)]
    # A process without a slot could never send its requests: fewer processes take part.
    active = min(processes, slots)
    return [Begin(level, i, active, slots // active + (i < slots % active)) for i in range(active)]
