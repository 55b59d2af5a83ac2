"""Masks of many matchers of llguidance, for one thread that must not wait long for them.

Most masks take some 10 us: of a few matchers the caller's thread makes them itself, which is less
than it takes to wake others. Some take a millisecond or two (a text inside a string whose length is
bounded), and most often so does the one behind. These, and those of many matchers, are made by
threads of the library, which need no interpreter's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import llguidance
import numpy as np

from tokenpod.engine.constraints.guidance_matcher import GuidanceMatcher, without_end
from tokenpod.engine.constraints.library import SLOW_NS, Advanced, Words

#: Of so many matchers at most the caller's thread makes the masks, while it needs no longer. (Of 64
#: cold JSON schemas over 128,000 tokens an H200's host needs 2.6 ms alone, 1.2 ms with 16 threads.)
_FEW, _ALONE_NS = 12, 500_000


class Batches:
    """Threads that make masks together.

    Args:
        vocab: tokens of the model; a mask has one bit more, for the end.
        threads: how many.
    """

    def __init__(self, vocab: int, threads: int) -> None:
        self._vocab, self._threads = vocab, threads
        self._executor = llguidance.LLExecutor(threads)

    def advance(self, taken: Sequence[tuple[GuidanceMatcher, int]]) -> Advanced:
        """Go on with a token of each of several matchers: what `fill` says of each."""
        found = np.empty((len(taken), self._vocab // 32 + 1), np.int32)
        over: list[int] = []
        left = list(range(len(taken)))
        if len(taken) <= _FEW:
            left.sort(key=lambda at: taken[at][0].took)
            over, left = self._alone(taken, left, found)
        suspects = [at for at, (matcher, _) in enumerate(taken) if matcher.took > SLOW_NS]
        if left:
            began = time.monotonic_ns()
            over += self._together(taken, left, found)
            if time.monotonic_ns() - began > SLOW_NS * -(-len(left) // self._threads):
                suspects += left
        ends = without_end(found, self._vocab)
        return Advanced(found[:, : -(-self._vocab // 32)], ends, over, suspects)

    def _alone(
        self, taken: Sequence[tuple[GuidanceMatcher, int]], wanted: list[int], found: Words
    ) -> tuple[list[int], list[int]]:
        """In the caller's thread: which have reached a limit, and which are left."""
        until = time.monotonic_ns() + _ALONE_NS
        address, size = found.ctypes.data, found.strides[0]
        over: list[int] = []
        for done, at in enumerate(wanted):
            matcher, token = taken[at]
            if time.monotonic_ns() + matcher.took > until:
                return over, wanted[done:]
            if not matcher.advance(token, address + at * size, size):
                over.append(at)
        return over, []

    def _together(
        self, taken: Sequence[tuple[GuidanceMatcher, int]], wanted: list[int], found: Words
    ) -> list[int]:
        """In the library's threads: which have reached a limit."""
        tokens = [(taken[at][0].library, taken[at][1]) for at in wanted]
        read = self._executor.consume_token_par(tokens)
        going_on = [(tokens[i][0], at) for i, at in enumerate(wanted) if read[i]]
        address, size = found.ctypes.data, found.strides[0]
        if going_on:  # of none it is an error
            self._executor.unsafe_compute_mask_ptr(going_on, address, size, len(found))
        for at in wanted:
            # How long each took is not known: sooner or later it is tried alone.
            taken[at][0].took //= 2
        return [at for at in wanted if taken[at][0].library.is_error()]
