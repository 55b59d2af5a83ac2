"""Compiled constraints by their content, the least recently used forgotten first."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from tokenpod.core.constraints import Constraint
from tokenpod.engine.constraints.library import Matcher, Words

#: What a compiled constraint takes, about, as measured (benchmarks/constraints.py at 487f27e9): so
#: much whatever it says, and so many bytes for each of its text.
_BASE_BYTES, _BYTES_PER_BYTE = 200_000, 100
#: And a matcher that has followed a text, with what it has found out.
_USED_BYTES = 600_000
#: Texts that begin from one that was compiled in less than so many nanoseconds of its thread.
MOST_SHARING, _DEAR_NS = 2, 10_000_000


@dataclass(frozen=True, slots=True)
class Compiled:
    """A matcher at the beginning of a text, its mask, and whether the empty text satisfies it."""

    matcher: Matcher
    words: Words
    ends: bool
    #: See `Library.compile`.
    prepared: str = ""


@dataclass(slots=True)
class _Entry:
    compiled: Compiled
    nbytes: int
    #: How many texts more may begin from it.
    left: float
    #: Matchers whose texts are over, back at the beginning.
    used: list[Matcher] = field(default_factory=list)


class CompileCache:
    """Compiled constraints, up to so many bytes. Its methods may be called by several threads.

    Copies of a matcher share what the library has found out of its grammar, and a lock. With one
    that 64 texts shared a mask took 201 us on average on an H200's host, with one for every four
    30 us, but 64 rows under one schema had 0.915 of the rate without, and 0.937 with one for every
    two, as with one each. So two texts begin from each compiled constraint, and for more it is
    compiled again, unless that takes long.

    A matcher whose text is over follows another one: it needs no compiling, and a fifth less for
    each mask than when it was new.
    """

    def __init__(self, most_bytes: int) -> None:
        self.hits = self.misses = 0
        self._most = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[Constraint, _Entry] = OrderedDict()
        self._lock = Lock()

    def used(self, constraint: Constraint) -> tuple[Compiled, Matcher] | None:
        """A matcher for another text of this constraint, and what it was compiled to."""
        with self._lock:
            found = self._entries.get(constraint)
            if found is None or not found.used:
                return None
            self.hits += 1
            self._entries.move_to_end(constraint)
            self._grow(found, -_USED_BYTES)
            return found.compiled, found.used.pop()

    def give_back(self, constraint: Constraint, matcher: Matcher) -> None:
        """Keep a matcher, back at its beginning, while there is room for it."""
        with self._lock:
            found = self._entries.get(constraint)
            if found is not None and self._bytes + _USED_BYTES <= self._most:
                self._grow(found, _USED_BYTES)
                found.used.append(matcher)

    def get(
        self,
        constraint: Constraint,
        make: Callable[[Compiled | None], Compiled],
        texts: int = 1,
    ) -> Compiled:
        """The compiled constraint, for so many texts.

        Args:
            constraint: it.
            make: compiles it, without the lock; it is given what was compiled before, if that is
                still there.
            texts: how many begin from it.
        """
        with self._lock:
            found = self._entries.get(constraint)
            if found is not None and found.left >= texts:
                self._entries.move_to_end(constraint)
                self.hits += 1
                found.left -= texts
                return found.compiled
            self.misses += 1
        began = time.thread_time_ns()
        made = make(found.compiled if found else None)
        dear = time.thread_time_ns() - began > _DEAR_NS
        size = _BASE_BYTES + _BYTES_PER_BYTE * len(msgspec.msgpack.encode(constraint))
        size += made.words.nbytes + len(made.prepared)
        with self._lock:
            before = self._entries.pop(constraint, None)
            if before is not None:
                self._bytes -= before.nbytes
            if size <= self._most:
                left = math.inf if dear else MOST_SHARING - texts
                entry = self._entries[constraint] = _Entry(made, size, left)
                self._bytes += size
                if before is not None:
                    entry.used = before.used
                    self._grow(entry, _USED_BYTES * len(entry.used))
                while self._bytes > self._most:
                    self._bytes -= self._entries.popitem(last=False)[1].nbytes
        return made

    def _grow(self, entry: _Entry, nbytes: int) -> None:
        entry.nbytes += nbytes
        self._bytes += nbytes
