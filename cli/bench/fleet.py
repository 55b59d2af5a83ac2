"""The worker processes of one command, and one level's outcome from all of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from tokenpod_client.cli.bench.figures import Record
from tokenpod_client.cli.bench.messages import Begin, Level, Outcome, Plan, Progress
from tokenpod_client.cli.remote import RemoteError

#: Seconds from telling the workers when to start until then: enough to reach all of them.
_HEAD_START = 0.05


@dataclass(frozen=True)
class Measured:
    """One level that has ended, with the outcome of each client process that took part."""

    plan: Plan
    level: Level
    outcomes: list[Outcome]

    @cached_property
    def requests(self) -> list[Record]:
        """Every request, in the order of their numbers."""
        found = [record for outcome in self.outcomes for record in outcome.records]
        return sorted(found, key=lambda record: record.index)

    @cached_property
    def good(self) -> list[Record]:
        """The requests that succeeded."""
        return [record for record in self.requests if record.ok]

    @cached_property
    def failed(self) -> list[Record]:
        """The requests that did not."""
        return [record for record in self.requests if not record.ok]

    @property
    def duration(self) -> float:
        """Seconds from the start until the last request had ended."""
        return max((record.ended for record in self.requests), default=0.0)


class Fleet:
    """A plan's worker processes, which end with the block that they are made for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._workers: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Fleet:
        for _ in range(self._plan.options.processes):
            own, theirs = Pipe()
            # -P: nothing is imported from the working directory. A group of its own: Ctrl-C ends
            # the command, which ends its workers.
            command = [sys.executable, "-P", "-m", "tokenpod_client.cli.bench.worker"]
            self._workers[own] = subprocess.Popen(command, stdin=theirs.fileno(), process_group=0)
            theirs.close()
            self._send(own, self._plan)
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        for pipe, worker in self._workers.items():
            pipe.close()
            if problem:
                worker.kill()
        for worker in self._workers.values():
            worker.wait()

    def run(self, level: Level, on_progress: Callable[[int, int], None]) -> Measured:
        """Run one level to its end. Raises RemoteError if a worker ends.

        `on_progress` is called with how many requests have ended and how many of them failed.
        """
        begins = divide(level, len(self._workers))
        pipes = list(self._workers)[: len(begins)]
        for pipe, begin in zip(pipes, begins, strict=True):
            self._send(pipe, begin)
        latest: dict[Connection, Progress] = {pipe: self._receive(pipe) for pipe in pipes}
        start = time.monotonic() + _HEAD_START
        for pipe in pipes:
            self._send(pipe, start)
        outcomes: dict[Connection, Outcome] = {}
        while len(outcomes) < len(pipes):
            for ready in wait([pipe for pipe in pipes if pipe not in outcomes]):
                assert isinstance(ready, Connection)
                answer = self._receive(ready)
                if isinstance(answer, Outcome):
                    outcomes[ready] = answer
                    continue
                latest[ready] = answer
                ended = sum(each.ended for each in latest.values())
                on_progress(ended, sum(each.failed for each in latest.values()))
        return Measured(self._plan, level, [outcomes[pipe] for pipe in pipes])

    def _send(self, pipe: Connection, message: Plan | Begin | float) -> None:
        try:
            pipe.send(message)
        except ConnectionError as error:
            raise self._ended(pipe) from error

    def _receive(self, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended(pipe) from error

    def _ended(self, pipe: Connection) -> RemoteError:
        number, status = list(self._workers).index(pipe), self._workers[pipe].wait()
        return RemoteError(f"client process {number} ended with status {status}")


def divide(level: Level, processes: int) -> list[Begin]:
    """What the first processes begin, together all requests; the other processes have none."""
    slots = level.load.concurrency
    if slots is None:
        return [Begin(level, process, processes) for process in range(processes)]
    # A process without a slot could never send its requests: fewer processes take part.
    active = min(processes, slots)
    return [Begin(level, i, active, slots // active + (i < slots % active)) for i in range(active)]
