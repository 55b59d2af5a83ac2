"""One text under a grammar of llguidance."""

from __future__ import annotations

import time

import llguidance
import numpy as np

from tokenpod.engine.constraints.library import LimitReached, Words

_WORD_BYTES = 4
#: Characters of an error that a client gets.
_MOST_SHOWN = 500
#: Texts that one matcher may follow. What the library has found out stays with it from text to
#: text, and counts towards the limit on its lexer's states.
_MOST_TEXTS = 16
#: What it calls by a name of its own.
_NAMED = {
    "NoExtensionBias": "no text conforms to it",
    "lexer precomputation failed; either increase limits.initial_lexer_fuel or disable"
    " limits.precompute_large_lexemes": "its expressions have too many states",
}


class GuidanceMatcher:
    """The state of one text under a constraint. Used by one thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self._words = np.zeros(vocab // 32 + 1, np.int32)
        #: What the last mask took of its thread's time, about, in nanoseconds.
        self.took = 0
        self._texts = 1

    def copy(self) -> GuidanceMatcher:
        """An independent matcher in the same state."""
        return GuidanceMatcher(self._matcher.deep_copy(), self._vocab)

    def begin_again(self) -> bool:
        """Go back to the beginning, for another text; False: it is of no use for one."""
        self._texts += 1
        if self._texts > _MOST_TEXTS or self._matcher.is_error():
            return False
        self.took = 0
        return bool(self._matcher.reset()) and not self._matcher.is_error()

    def take(self, token: int) -> None:
        """Go on with a token that the last mask allows. Raises LimitReached."""
        if not self._matcher.consume_token(token):
            raise LimitReached(told(self._matcher.get_error()))

    def fill(self, words: Words) -> bool:
        """Write which tokens may follow; whether the text may end here. Raises LimitReached."""
        found = self._words
        began = time.thread_time_ns()
        self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, _WORD_BYTES * len(found))
        self.took = time.thread_time_ns() - began
        if self._matcher.is_error():
            raise LimitReached(told(self._matcher.get_error()))
        ends = bool(without_end(found[None], self._vocab)[0])
        words[:] = found[: len(words)]
        return ends

    def advance(self, token: int, address: int, size: int) -> bool:
        """Go on with a token and write the mask behind it; False: a limit was reached.

        Args:
            token: one that the last mask allows.
            address: where the mask goes, with a bit for the end behind the others.
            size: in bytes, of that.
        """
        began = time.thread_time_ns()
        if self._matcher.consume_token(token):
            self._matcher.unsafe_compute_mask_ptr(address, size)
        self.took = time.thread_time_ns() - began
        return not self._matcher.is_error()

    @property
    def library(self) -> llguidance.LLMatcher:
        """The library's own matcher."""
        return self._matcher

    @property
    def whole(self) -> bool:
        """Whether the text so far satisfies the constraint."""
        return bool(self._matcher.is_accepting())


def without_end(masks: Words, vocab: int) -> np.ndarray:
    """Take the token that stands for the end out of masks [n, words]; [n] whether it was in it."""
    last, bit = divmod(vocab, 32)
    ends: np.ndarray = (masks[:, last] >> bit & 1).astype(bool)
    masks[:, last] &= np.int32((1 << bit) - 1)
    return ends


def told(error: str) -> str:
    """The first lines of an error, as one."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    text = _NAMED.get(text, text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
