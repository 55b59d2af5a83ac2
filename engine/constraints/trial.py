"""A process that compiles constraints first: `python -m tokenpod.engine.constraints.trial FD`.

What compiling costs is its author's to say. The library can't be stopped meanwhile, and there are
constraints of a few hundred bytes that take it minutes or gigabytes, or let its stack overflow. In
this process that harms nobody: the kernel limits its memory, its stack is smaller than those in the
engine, and the engine kills it when its time is over (trials.py). torch is not imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec
import numpy as np

from tokenpod.core.constraints import Constraint
from tokenpod.core.link import Link, LinkClosed
from tokenpod.core.own_limits import be_first_to_go, limit_memory
from tokenpod.core.parent import die_with_parent
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import LimitReached, Refused, Words

#: A quarter of what the engine's threads have that compile (workers.py).
_STACK_BYTES = 2 << 20
#: What compiling may take beyond what the process has.
MEMORY_BYTES = 512 << 20


class Begin(msgspec.Struct, array_like=True, tag=True):
    """The first message: the model's tokens that are no text, by id, and how many there are."""

    vocabulary: int
    special: dict[int, bytes]
    #: How much the process yields to others: 0 to 19.
    nice: int


class Try(msgspec.Struct, array_like=True, tag=True):
    """Compile this, and make its first mask."""

    constraint: Constraint


class Tried(msgspec.Struct, array_like=True, tag=True):
    """What `Library.compile` takes besides, or what is wrong with the constraint."""

    prepared: str = ""
    problem: str = ""


def main() -> int:
    """Try one constraint after another until the engine hangs up."""
    die_with_parent()
    # The engine decides when to stop; a terminal's Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    be_first_to_go()
    link = Link[Any](socket.socket(fileno=int(sys.argv[1])), Begin | Try)  # type: ignore[arg-type]
    try:
        begin = link.receive(None)[0]
        assert isinstance(begin, Begin), "the first message is Begin"
        os.nice(begin.nice)
        library = _library(begin)
        limit_memory(MEMORY_BYTES)
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_serve, args=(link, library, begin.vocabulary))
        thread.start()
        thread.join()
    except LinkClosed:
        pass
    return 0


def _serve(link: Link[Any], library: Guidance, vocabulary: int) -> None:
    words = np.zeros(-(-vocabulary // 32), np.int32)
    with contextlib.suppress(LinkClosed):
        link.send(Tried())
        while True:
            for job in link.receive(None):
                link.send(_tried(library, job.constraint, words))


def _library(begin: Begin) -> Guidance:
    """A library in which the special tokens have their ids, and there is one token a byte."""
    tokens = [b""] * begin.vocabulary
    for token, name in begin.special.items():
        tokens[token] = name
    free = (token for token in range(begin.vocabulary) if token not in begin.special)
    for byte, token in zip(range(256), free, strict=False):
        tokens[token] = bytes([byte])
    return Guidance(tokens, [*begin.special])


def _tried(library: Guidance, constraint: Constraint, words: Words) -> Tried:
    try:
        prepared, matcher = library.prepare(constraint)
        matcher.fill(words)
        return Tried(prepared)
    except (Refused, LimitReached) as error:
        return Tried(problem=str(error))
    except MemoryError:
        return Tried(problem="it takes too much memory to compile")
    except BaseException:  # what the library raises when it panics is no Exception
        return Tried(problem="the library fails to compile it")


if __name__ == "__main__":
    sys.exit(main())
