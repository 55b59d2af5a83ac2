"""Constraints are compiled by other processes before the engine does it (trial.py)."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock

from tokenpod.core.constraints import Constraint
from tokenpod.core.link import Link, LinkClosed
from tokenpod.engine.constraints.library import Fault, Lost, Refused
from tokenpod.engine.constraints.trial import Begin, TooLong, Tried, Try, receive

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.constraints.trial")
#: Seconds that lanes may take to start, and to answer when a trial's time is over.
START_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
#: How much the lane for those that take long yields to others.
_NICE = 10


@dataclass(slots=True)
class Lanes:
    """Those of one process, while nobody uses them."""

    process: subprocess.Popen[bytes]
    quick: SimpleQueue[Link[Tried]] = field(default_factory=SimpleQueue)
    #: For constraints that take long.
    dear: SimpleQueue[Link[Tried]] = field(default_factory=SimpleQueue)


class Trials:
    """Lanes for trials, which start with the first. Used by as many threads as there are lanes.

    Args:
        tokens: the bytes of each token of the model, by id.
        special: those that are no text.
        quick: lanes for most constraints; there is one more, for those that take long.
    """

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], quick: int) -> None:
        nice = [0] * quick + [_NICE]
        self._begin = Begin(len(tokens), {token: tokens[token] for token in special}, nice)
        self._lock = Lock()
        self._lanes: Lanes | None = None

    def start(self) -> Lanes:
        """Wait until all lanes are there. Raises Lost and TooLong."""
        with self._lock:
            if self._lanes is not None:
                return self._lanes
            try:
                process, links = self._begun()
            except OSError as error:
                raise Lost from error
            try:
                for link in links:
                    receive(link, START_SECONDS)
            except BaseException as error:
                process.kill()
                process.wait()
                if isinstance(error, LinkClosed):
                    raise Lost from error
                raise
            lanes = self._lanes = Lanes(process)
            for link, nice in zip(links, self._begin.nice, strict=True):
                (lanes.dear if nice else lanes.quick).put(link)
            return lanes

    def try_first(self, constraint: Constraint, seconds: float, *, dear: bool = False) -> str:
        """What `Library.compile` takes besides. Raises Refused, TooLong, Fault and Lost.

        Args:
            constraint: it.
            seconds: for this.
            dear: at a low priority, behind others of that kind.
        """
        try:
            return self._try(Try(constraint, seconds), dear=dear)
        except Lost:
            return self._try(Try(constraint, seconds), dear=dear)

    def _try(self, job: Try, *, dear: bool) -> str:
        lanes = self.start()
        free = lanes.dear if dear else lanes.quick
        link = free.get()
        try:
            link.send(job)
            answer = receive(link, job.seconds + _ANSWER_SECONDS)
        except (LinkClosed, TooLong) as error:
            self._end(lanes)
            raise Lost from error
        finally:
            free.put(link)
        if answer.lost:
            raise Lost
        if answer.late:
            raise TooLong
        if answer.fault:
            raise Fault(answer.fault)
        if answer.problem:
            raise Refused(answer.problem)
        return answer.prepared

    def _begun(self) -> tuple[subprocess.Popen[bytes], list[Link[Tried]]]:
        pairs = [socket.socketpair() for _ in self._begin.nice]
        numbers = [theirs.fileno() for _, theirs in pairs]
        try:
            process = subprocess.Popen(
                [*_COMMAND, *map(str, numbers)], pass_fds=numbers, stdin=subprocess.DEVNULL
            )
        finally:
            for _, theirs in pairs:
                theirs.close()
        links = [Link(ours, Tried) for ours, _ in pairs]
        links[0].send(self._begin)
        return process, links

    def _end(self, lanes: Lanes) -> None:
        """One is gone, which is not a constraint's doing: all begin anew with the next one.

        Others that waited for one of these lanes may find that later, too.
        """
        with self._lock:
            if self._lanes is lanes:
                lanes.process.kill()
                lanes.process.wait()
                self._lanes = None
