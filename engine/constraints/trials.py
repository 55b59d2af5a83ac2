"""Processes in which constraints are compiled before the engine does it (trial.py).

try_first(constraint) -> an idle process -> what `Library.compile` takes, or Refused
                            | time is over -> SIGKILL, a new process, TooLong
                            | it has ended -> a new process, Refused
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Lock

from tokenpod.core.constraints import Constraint
from tokenpod.core.link import Link, LinkClosed
from tokenpod.engine.constraints.library import Refused
from tokenpod.engine.constraints.trial import Begin, Tried, Try

#: -P: nothing is imported from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "tokenpod.engine.constraints.trial")
#: Seconds that a process may take to start.
START_SECONDS = 60.0
_TOO_DEEP = "its parts are too many, nested too deeply, or name each other in too long a row"
_ENDS = {
    -signal.SIGABRT: "it takes too much memory to compile",
    -signal.SIGSEGV: _TOO_DEEP,
    -signal.SIGBUS: _TOO_DEEP,
}


class TooLong(Exception):
    """A trial was not over in time."""


class Trials:
    """So many processes, started with the first trial. Used by as many threads as processes.

    Args:
        tokens: the bytes of each token of the model, by id.
        special: those that are no text.
        count: of processes; with one more than threads there is one that has started already.
        nice: how much they yield to others.
    """

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], count: int, nice: int = 0
    ) -> None:
        self._begin = Begin(len(tokens), {token: tokens[token] for token in special}, nice)
        #: Processes that are yet to be started.
        self._missing = count
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        self._lock = Lock()

    def ready(self) -> None:
        """Wait until a process has started. Raises OSError, TooLong and LinkClosed."""
        self._start()
        process = self._idle.get()
        try:
            process.start()
        finally:
            self._idle.put(process)

    def try_first(self, constraint: Constraint, seconds: float) -> str:
        """What `Library.compile` takes besides. Raises Refused and TooLong."""
        self._start()
        process = self._idle.get()
        try:
            answer = process.ask(constraint, seconds)
        except (LinkClosed, TooLong) as error:
            status = process.end()
            with self._lock:
                self._missing += 1
            with contextlib.suppress(OSError):  # the next one tries again
                self._start()
            if isinstance(error, TooLong):
                raise
            raise Refused(_ENDS.get(status, "the library fails to compile it")) from error
        self._idle.put(process)
        if answer.problem:
            raise Refused(answer.problem)
        return answer.prepared

    def _start(self) -> None:
        with self._lock:
            while self._missing:
                self._idle.put(_Process(self._begin))
                self._missing -= 1


class _Process:
    """One of them: it starts by itself, and has one constraint at a time."""

    def __init__(self, begin: Begin) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._link = Link(ours, Tried)
        with contextlib.suppress(LinkClosed):  # it has ended: so the first receive says
            self._link.send(begin)
        self._started = False

    def start(self) -> None:
        """Wait until it has started. Raises LinkClosed and TooLong."""
        if not self._started:
            self._receive(START_SECONDS)
            self._started = True

    def ask(self, constraint: Constraint, seconds: float) -> Tried:
        """Have a constraint tried. Raises LinkClosed and TooLong."""
        self.start()
        self._link.send(Try(constraint))
        return self._receive(seconds)

    def end(self) -> int:
        """Kill it, whatever it does; what it had ended with before, else -SIGKILL."""
        self._process.kill()
        self._link.close()
        return self._process.wait()

    def _receive(self, seconds: float) -> Tried:
        until = time.monotonic() + seconds
        while True:
            if messages := self._link.receive(max(until - time.monotonic(), 0)):
                return messages[0]
            if time.monotonic() >= until:
                raise TooLong
