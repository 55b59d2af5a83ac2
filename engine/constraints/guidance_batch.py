"""Masks of many matchers of llguidance, for one thread that must not wait long for them.

Most masks take some 10 us, so little that threads would cost more than they do: the caller's thread
makes these, one after the other. Some take a millisecond or two (a text inside a string whose
length is bounded), and most often so does the one behind: threads of the library make those
meanwhile, together, and without the interpreter's lock. What is left after a while goes there too.

    caller's thread    quick quick quick ... quick heavy      -> waits for the others
    threads            heavy heavy heavy                      all but one, which is timed anew
                       heavy heavy
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance
import numpy as np

from tokenpod.engine.constraints.guidance_matcher import GuidanceMatcher, without_end
from tokenpod.engine.constraints.library import SLOW_NS, Advanced, Words

#: After so long the caller's thread leaves what it has not begun to the others.
_ALONE_NS = 500_000

_Taken = Sequence[tuple[GuidanceMatcher, int]]


class Batches:
    """Threads that make masks together.

    Args:
        vocab: tokens of the model; a mask has one bit more, for the end.
        threads: how many.
    """

    def __init__(self, vocab: int, threads: int) -> None:
        self._vocab, self._threads = vocab, threads
        self._executor = llguidance.LLExecutor(threads)
        #: Waits for the library's threads while the caller makes masks itself.
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="constraints-together")
        self._calls = 0

    def advance(self, taken: _Taken) -> Advanced:
        """See `Library.advance`."""
        n = len(taken)
        found = np.empty((n, self._vocab // 32 + 1), np.int32)
        heavy = [at for at, (matcher, _) in enumerate(taken) if matcher.heavy]
        own = [at for at, (matcher, _) in enumerate(taken) if not matcher.heavy]
        self._calls += 1
        if heavy:  # each has its turn, so that it is found out when it is quick again
            own.append(heavy.pop(self._calls % len(heavy)))
        making: Future[list[int]] | None = None
        if heavy:
            making = self._beside.submit(self._together, taken, heavy, found)
        over, left = self._alone(taken, own, found)
        suspects = [at for at in own if taken[at][0].took > SLOW_NS]
        if left:
            began = time.monotonic_ns()
            over += self._together(taken, left, found)
            if time.monotonic_ns() - began > SLOW_NS * -(-len(left) // self._threads):
                suspects += left
        if making is not None:
            over += making.result()
        ends = without_end(found, self._vocab)
        return Advanced(found[:, : -(-self._vocab // 32)], ends, over, suspects)

    def _alone(self, taken: _Taken, wanted: list[int], found: Words) -> tuple[list[int], list[int]]:
        """In the caller's thread: which have reached a limit, and which are left."""
        until = time.monotonic_ns() + _ALONE_NS
        address, size = found.ctypes.data, found.strides[0]
        over = []
        for done, at in enumerate(wanted):
            matcher, token = taken[at]
            if not matcher.advance(token, address + at * size, size):
                over.append(at)
            if time.monotonic_ns() > until:
                return over, wanted[done + 1 :]
        return over, []

    def _together(self, taken: _Taken, wanted: list[int], found: Words) -> list[int]:
        """In the library's threads: which have reached a limit."""
        tokens = [(taken[at][0].library, taken[at][1]) for at in wanted]
        read = self._executor.consume_token_par(tokens)
        going_on = [(tokens[i][0], at) for i, at in enumerate(wanted) if read[i]]
        address, size = found.ctypes.data, found.strides[0]
        self._executor.unsafe_compute_mask_ptr(going_on, address, size, len(found))
        return [at for at in wanted if taken[at][0].library.is_error()]
