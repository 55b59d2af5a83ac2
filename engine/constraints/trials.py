"""Constraints are compiled by other processes before the engine does it (trial.py)."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock

from tokenpod.core.constraints import Constraint
from tokenpod.core.link import Link, LinkClosed
from tokenpod.engine.constraints.library import Refused
from tokenpod.engine.constraints.trial import Begin, TooLong, Tried, Try, receive

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.constraints.trial")
#: Seconds that lanes may take to start, and to answer when a trial's time is over.
START_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
#: How much the lane for those that take long yields to others.
_NICE = 10


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
        self._process: subprocess.Popen[bytes] | None = None
        self._quick: SimpleQueue[Link[Tried]] = SimpleQueue()
        self._dear: SimpleQueue[Link[Tried]] = SimpleQueue()

    def start(self) -> None:
        """Wait until all lanes are there. Raises OSError, LinkClosed and TooLong."""
        with self._lock:
            if self._process is not None:
                return
            process, links = self._lanes()
            try:
                for link in links:
                    receive(link, START_SECONDS)
            except BaseException:
                process.kill()
                process.wait()
                raise
            self._quick, self._dear = SimpleQueue(), SimpleQueue()
            for link, nice in zip(links, self._begin.nice, strict=True):
                (self._dear if nice else self._quick).put(link)
            self._process = process

    def try_first(self, constraint: Constraint, seconds: float, *, dear: bool = False) -> str:
        """What `Library.compile` takes besides. Raises Refused and TooLong.

        Args:
            constraint: it.
            seconds: for this.
            dear: at a low priority, behind others of that kind.
        """
        self.start()
        lanes = self._dear if dear else self._quick
        link = lanes.get()
        try:
            link.send(Try(constraint, seconds))
            answer = receive(link, seconds + _ANSWER_SECONDS)
        except (LinkClosed, TooLong):
            self._end()
            raise Refused("it could not be tried") from None
        finally:
            lanes.put(link)
        if answer.late:
            raise TooLong
        if answer.problem:
            raise Refused(answer.problem)
        return answer.prepared

    def _lanes(self) -> tuple[subprocess.Popen[bytes], list[Link[Tried]]]:
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

    def _end(self) -> None:
        """A lane is gone, which is not a constraint's doing: all begin anew with the next one."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
