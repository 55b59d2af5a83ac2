"""Processes that compile constraints first: `python -m tokenpod.engine.constraints.trial FD...`.

What compiling costs is its author's to say. The library can't be stopped meanwhile, and there are
constraints of a few hundred bytes that take it minutes or gigabytes, or let its stack overflow. In
a process of its own that harms nobody: the kernel limits its memory, its stack is smaller than
those in the engine, and it is killed when its time is over. torch is not imported.

    engine --link--> lane --fork--> worker: compiles, and may end
                       |              ^
                       +-- a new one, once it has ended or its time was over

There is a lane for each link. All come of one process, so what they know of the vocabulary is there
once, and a new worker need not load anything; the engine starts a process once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from typing import Any, TypeVar

import msgspec
import numpy as np

from tokenpod.core.constraints import Constraint
from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.own_process import be_first_to_go, die_with_parent, limit_memory
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import LimitReached, Refused, Words

T = TypeVar("T")

#: A quarter of what the engine's threads have that compile (workers.py).
_STACK_BYTES = 2 << 20
#: What compiling may take beyond what the process has.
_MEMORY_BYTES = 512 << 20
_TOO_DEEP = "its parts are too many, nested too deeply, or name each other in too long a row"
#: How a worker ends when an allocation fails, and when its stack overflows.
_ENDS = {
    -signal.SIGABRT: "it takes too much memory to compile",
    -signal.SIGSEGV: _TOO_DEEP,
    -signal.SIGBUS: _TOO_DEEP,
}
_FAILED = "the library fails to compile it"


class Begin(msgspec.Struct, array_like=True, tag=True):
    """The first message, over the first link."""

    #: The model's tokens: how many there are, and those that are no text, by id.
    vocabulary: int
    special: dict[int, bytes]
    #: How much each lane yields to others: 0 to 19.
    nice: list[int]


class Try(msgspec.Struct, array_like=True, tag=True):
    """Compile this, and make its first mask, in so many seconds."""

    constraint: Constraint
    seconds: float


class Tried(msgspec.Struct, array_like=True, tag=True):
    """What `Library.compile` takes besides, or what is wrong; first of all: the lane is there."""

    prepared: str = ""
    problem: str = ""
    #: The traceback of an exception that nobody foresaw.
    fault: str = ""
    #: The time was over.
    late: bool = False
    #: The worker was killed, as the kernel does where memory is short.
    lost: bool = False


class TooLong(Exception):
    """Nothing came in time."""


def receive(link: Link[T], seconds: float) -> T:
    """The next message. Raises LinkClosed and TooLong."""
    until = time.monotonic() + seconds
    while True:
        if messages := link.receive(max(until - time.monotonic(), 0)):
            return messages[0]
        if time.monotonic() >= until:
            raise TooLong


def main() -> int:
    """Try one constraint after another until the engine hangs up."""
    die_with_parent()
    # The engine decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    be_first_to_go()
    # Forking is fine: the other threads are the arithmetic library's, which is not used.
    warnings.simplefilter("ignore", DeprecationWarning)
    links = [_link(socket.socket(fileno=int(number))) for number in sys.argv[1:]]
    with contextlib.suppress(LinkClosed):
        begin = links[0].receive(None)[0]
        assert isinstance(begin, Begin), "the first message is Begin"
        library, own = _library(begin), 0
        for at in range(1, len(links)):
            if os.fork() == 0:
                die_with_parent()
                own = at
                break
        for at, link in enumerate(links):
            if at != own:
                link.close()
        os.nice(begin.nice[own])
        _Lane(links[own], library, begin.vocabulary).serve()
    return 0


class _Lane:
    """Has constraints tried by a worker, which it replaces."""

    def __init__(self, link: Link[Any], library: Guidance, vocabulary: int) -> None:
        self._link = link
        self._library, self._vocabulary = library, vocabulary
        self._pid, self._worker = self._fork()

    def serve(self) -> None:
        """Until the engine hangs up (LinkClosed)."""
        self._link.send(Tried())
        while True:
            for job in self._link.receive(None):
                self._link.send(self._try(job))

    def _try(self, job: Try) -> Tried:
        try:
            self._worker.send(job)
            answer: Tried = receive(self._worker, job.seconds)
            return answer
        except (LinkClosed, TooLong) as error:
            os.kill(self._pid, signal.SIGKILL)
            self._worker.close()
            status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._pid, self._worker = self._fork()
            if isinstance(error, TooLong):
                return Tried(late=True)
            if status == -signal.SIGKILL:
                return Tried(lost=True)
            return Tried(problem=_ENDS.get(status, _FAILED))

    def _fork(self) -> tuple[int, Link[Any]]:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, Link[Any](ours, Tried)
        try:
            die_with_parent()
            self._link.close()
            ours.close()
            limit_memory(_MEMORY_BYTES)
            threading.stack_size(_STACK_BYTES)
            work = _link(theirs), self._library, self._vocabulary
            thread = threading.Thread(target=_work, args=work)
            thread.start()
            thread.join()
        finally:
            os._exit(0)


def _link(endpoint: socket.socket) -> Link[Any]:
    return Link[Any](endpoint, Begin | Try)  # type: ignore[arg-type]


def _library(begin: Begin) -> Guidance:
    """A library in which the special tokens have their ids, and there is one token a byte."""
    tokens = [b""] * begin.vocabulary
    for token, name in begin.special.items():
        tokens[token] = name
    free = (token for token in range(begin.vocabulary) if token not in begin.special)
    for byte, token in zip(range(256), free, strict=False):
        tokens[token] = bytes([byte])
    return Guidance(tokens, [*begin.special])


def _work(link: Link[Any], library: Guidance, vocabulary: int) -> None:
    words = np.zeros(-(-vocabulary // 32), np.int32)
    with contextlib.suppress(LinkClosed):
        while True:
            for job in link.receive(None):
                link.send(_tried(library, job.constraint, words))


def _tried(library: Guidance, constraint: Constraint, words: Words) -> Tried:
    try:
        prepared, matcher = library.prepare(constraint)
        matcher.fill(words)
        return Tried(prepared)
    except (Refused, LimitReached) as error:
        return Tried(problem=str(error))
    except MemoryError:
        return Tried(problem=_ENDS[-signal.SIGABRT])
    except RecursionError:
        return Tried(problem=_TOO_DEEP)
    except Exception:
        return Tried(fault=traceback.format_exc())
    except BaseException:  # what the library raises when it panics is no Exception
        return Tried(problem=_FAILED)


if __name__ == "__main__":
    sys.exit(main())
