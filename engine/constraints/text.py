"""One constrained sequence: its matcher, and the mask of its next token."""

from __future__ import annotations

import numpy as np

from tokenpod.core.requests import Request
from tokenpod.engine.constraints.cache import Compiled
from tokenpod.engine.constraints.library import Words


class ConstrainedText:
    """The text of one sequence as far as its matcher has read it.

    Between `ask` and `is_ready` a worker owns the matcher and the mask; otherwise the step loop.

    Args:
        request: the sequence's.
        compiled: its constraint; the matcher is copied.
    """

    def __init__(self, request: Request, compiled: Compiled) -> None:
        #: Output tokens that the matcher has read.
        self.taken = 0
        #: The mask of the next token.
        self.words = compiled.words.copy()
        #: The mask is there.
        self.ready = False
        #: No token is left, or a limit was reached: the sequence is over.
        self.over = False
        #: A limit was reached: the matcher is of no use any more.
        self.broken = False
        #: When a worker began, in nanoseconds; 0: none is at work.
        self.began_at = 0
        #: Its last mask took long, so that others must not wait behind its next one.
        self.slow = False
        self._matcher = compiled.matcher.copy()
        sampling, stopping = request.sampling, request.stopping
        vocab_words = len(compiled.words)
        ends = stopping.eos_token_ids | stopping.stop_token_ids
        self._ends = bits_of(ends, vocab_words) if ends else None
        #: No end before so many tokens.
        self._least = stopping.min_new_tokens
        allowed = sampling.allowed_token_ids
        self._allowed = bits_of(allowed, vocab_words) if allowed else None
        self._narrow(compiled.ends)
        self.ready = True

    def advance(self, token: int) -> None:
        """Read a token and make the next mask. Raises LimitReached."""
        self._matcher.take(token)
        self.taken += 1
        self._narrow(self._matcher.fill(self.words))

    def whole_with(self, token: int) -> bool:
        """Whether the text is whole with this token as its last. Raises LimitReached."""
        self._matcher.take(token)
        return self._matcher.whole

    @property
    def whole(self) -> bool:
        """Whether the text so far is whole."""
        return not self.broken and self._matcher.whole

    def _narrow(self, may_end: bool) -> None:
        """Put in the tokens that end the sequence, and what else the request says of tokens."""
        if self._ends is not None:
            self.words &= ~self._ends
            if may_end and self.taken >= self._least:
                self.words |= self._ends
        if self._allowed is not None:
            self.words &= self._allowed
        self.over = not self.words.any()


def bits_of(tokens: object, words: int) -> Words:
    """[words] a mask of these tokens."""
    ids = np.array(sorted(tokens), np.int64)  # type: ignore[call-overload]
    ids = ids[ids < 32 * words]
    bits = np.zeros(32 * words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
