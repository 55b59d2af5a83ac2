"""The worker processes of one command, and one level's outcome from all of them."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tokenpod.cli.bench.messages import (
    HEAD_BYTES,
    Answer,
    Go,
    Level,
    Outcome,
    Plan,
    Progress,
    Ready,
    Record,
    Request,
    body_length,
    decode_answer,
    frame,
)

#: Seconds from the word to the start: enough for it to reach every worker.
_HEAD_START = 0.05

AnswerType = TypeVar("AnswerType", bound=Answer)
OnProgress = Callable[[int, int], None]


class FleetError(Exception):
    """A client process ended before its work; the text is for the operator."""


@dataclass(frozen=True, slots=True)
class ClientShare:
    """What one client process spent: `cpu_seconds` of `wall_seconds`."""

    cpu_seconds: float
    wall_seconds: float

    @property
    def busy(self) -> float:
        """Computing time over time. Above 1: its threads ran at once."""
        return self.cpu_seconds / self.wall_seconds if self.wall_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One level: every request, in the order of their numbers, and what the clients spent.

    Args:
        lags: how late the clients' event loops came, in seconds.
    """

    level: Level
    records: list[Record]
    clients: list[ClientShare]
    lags: list[float]


@asynccontextmanager
async def fleet(plan: Plan) -> AsyncIterator[Fleet]:
    """Worker processes for a plan (whose `process` is ignored); gone when the block is left."""
    workers: list[Process] = []
    try:
        for process in range(plan.processes):
            # -P: nothing is imported from the working directory.
            command = [sys.executable, "-P", "-m", "tokenpod.cli.bench.worker"]
            # A group of its own: Ctrl-C is the command's to hear, also while a worker starts.
            worker = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, process_group=0
            )
            workers.append(worker)
            await _tell(worker, msgspec.structs.replace(plan, process=process))
        yield Fleet(workers)
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

    def __init__(self, workers: list[Process]) -> None:
        self._workers = workers
        self._progress = [Progress(0, 0) for _ in workers]

    async def run(self, level: Level, on_progress: OnProgress) -> Measured:
        """Run one level to its end.

        Args:
            on_progress: called with how many requests have ended and how many of them failed.

        Raises FleetError.
        """
        self._progress = [Progress(0, 0) for _ in self._workers]
        await self._to_all(level)
        await asyncio.gather(*(self._expect(i, Ready) for i in range(len(self._workers))))
        await self._to_all(Go(time.monotonic() + _HEAD_START))
        waits = (self._outcome(i, on_progress) for i in range(len(self._workers)))
        outcomes = await asyncio.gather(*waits)
        records = [record for outcome in outcomes for record in outcome.records]
        records.sort(key=lambda record: record.index)
        clients = [ClientShare(o.cpu_seconds, o.wall_seconds) for o in outcomes if o.wall_seconds]
        return Measured(level, records, clients, [lag for o in outcomes for lag in o.lags])

    async def _to_all(self, message: Request) -> None:
        for worker in self._workers:
            await _tell(worker, message)

    async def _outcome(self, index: int, on_progress: OnProgress) -> Outcome:
        while True:
            answer = await self._read(index)
            if isinstance(answer, Outcome):
                return answer
            if isinstance(answer, Progress):
                self._progress[index] = answer
                ended = sum(p.ended for p in self._progress)
                on_progress(ended, sum(p.failed for p in self._progress))

    async def _expect(self, index: int, kind: type[AnswerType]) -> AnswerType:
        answer = await self._read(index)
        assert isinstance(answer, kind), f"a worker says {answer!r}"
        return answer

    async def _read(self, index: int) -> Answer:
        pipe = self._workers[index].stdout
        assert pipe is not None
        try:
            return decode_answer(
                await pipe.readexactly(body_length(await pipe.readexactly(HEAD_BYTES)))
            )
        except asyncio.IncompleteReadError as error:
            status = await self._workers[index].wait()
            raise FleetError(f"client process {index} ended with status {status}") from error


async def _tell(worker: Process, message: Request) -> None:
    assert worker.stdin is not None
    worker.stdin.write(frame(message))
    try:
        await worker.stdin.drain()
    except ConnectionError as error:
        raise FleetError(f"a client process ended with status {await worker.wait()}") from error
