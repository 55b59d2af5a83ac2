"""Compiled constraints by their content, the least recently used forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import msgspec

from tokenpod.core.constraints import Constraint
from tokenpod.engine.constraints.library import Matcher, Words

#: What a compiled constraint takes, about, as measured (benchmarks/constraints.py): so much
#: whatever it says, and so many bytes for each of its text.
_BASE_BYTES, _BYTES_PER_BYTE = 200_000, 100


@dataclass(frozen=True, slots=True)
class Compiled:
    """A matcher at the beginning of a text, its mask, and whether the empty text satisfies it."""

    matcher: Matcher
    words: Words
    ends: bool


class CompileCache:
    """Compiled constraints, up to so many bytes. Its methods may be called by several threads."""

    def __init__(self, most_bytes: int) -> None:
        self.hits = self.misses = 0
        self._most = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[Constraint, tuple[Compiled, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, constraint: Constraint, make: Callable[[], Compiled]) -> Compiled:
        """The compiled constraint; `make` is called without the lock."""
        with self._lock:
            if found := self._entries.get(constraint):
                self._entries.move_to_end(constraint)
                self.hits += 1
                return found[0]
            self.misses += 1
        made = make()
        size = _BASE_BYTES + _BYTES_PER_BYTE * len(msgspec.msgpack.encode(constraint))
        size += made.words.nbytes
        with self._lock:
            if constraint not in self._entries and size <= self._most:
                self._entries[constraint] = made, size
                self._bytes += size
                while self._bytes > self._most:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self._bytes -= freed
        return made
