"""One constrained sequence: its matcher, and the masks of its next tokens.

    outputs       a  b  c | d  e  f  ?
    masks                   d  e  f  many     of output `taken` and those behind it
    matcher has read  ----------->|

A mask that allows a single token has the next one behind it already: the matcher reads that token
before it is drawn. So there is mostly one mask, and behind tokens that are forced there are more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tokenpod.core.requests import Request
from tokenpod.engine.constraints.cache import Compiled
from tokenpod.engine.constraints.library import LimitReached, Matcher, Words

#: Masks that are made ahead, at most.
MOST_AHEAD = 16


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens may be the next one."""

    #: [ceil(vocab / 32)]
    words: Words
    #: The only one of them, where the matcher reads on with it; -1: it waits for what is drawn.
    forced: int
    #: Whether the text is whole before it.
    whole: bool
    #: No token is left, or a limit was reached: the sequence is over.
    over: bool


class ConstrainedText:
    """The text of one sequence as far as it is known.

    The step loop takes masks from the front, and one worker at a time, which runs a job, adds some
    behind. Jobs yield before each mask.

    Args:
        request: the sequence's.
        compiled: its constraint.
        matcher: one of it, at the beginning, of which this is the only text; by default a copy of
            the compiled one.
    """

    def __init__(
        self, request: Request, compiled: Compiled, matcher: Matcher | None = None
    ) -> None:
        self.constraint = request.constraint
        #: Output tokens of the sequence.
        self.taken = 0
        #: Of output `taken` and behind it; empty while a worker makes the first.
        self.masks: deque[Mask] = deque()
        #: What workers have to do, in this order, and whether one is at it.
        self.jobs: deque[Iterator[None]] = deque()
        self.busy = False
        #: When the mask was begun that is being made, in nanoseconds; None: none is.
        self.began_at: int | None = None
        #: Its last mask took long, so that others must not wait behind its next one.
        self.slow = False
        #: It was read together with others, which took long: who is slow is yet to be found out.
        self.suspect = False
        #: The id of an exception that ended it; empty: none did.
        self.fault = ""
        #: What has been found along drafts.
        self._along = _Along(-1, ())
        self.matcher = matcher or compiled.matcher.copy()
        self._words = compiled.words
        #: Tokens that the matcher has read.
        self._read = 0
        sampling, stopping = request.sampling, request.stopping
        vocab_words = len(compiled.words)
        #: The tokens that end the sequence; texts with the same ones have the same object.
        self.ends = Ends.of(stopping.eos_token_ids | stopping.stop_token_ids, vocab_words)
        #: No end before so many tokens.
        self._least = stopping.min_new_tokens
        allowed = sampling.allowed_token_ids
        #: What else the request says of tokens; None: nothing.
        self.allowed = bits_of(allowed, vocab_words) if allowed else None
        mask = self._add(compiled.words.copy(), whole=compiled.ends, may_force=True)
        if mask.forced >= 0:
            list(self.read([mask.forced]))

    # -- for the loop --------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is there."""
        return len(self.masks) > 0

    @property
    def over(self) -> bool:
        """Whether there is no next token."""
        return self.ready and self.masks[0].over

    @property
    def forced(self) -> list[int]:
        """The next tokens, as far as each is the only one, and something may follow it."""
        masks = list(self.masks)
        return [mask.forced for mask, behind in pairwise(masks) if not behind.over]

    def took(self, tokens: Sequence[int]) -> list[int]:
        """The sequence has these tokens more; those that the matcher has yet to read."""
        unread: list[int] = []
        for token in tokens:
            self.taken += 1
            if unread or self.masks.popleft().forced < 0:
                unread.append(token)
        return unread

    def masks_of(self, drafts: Sequence[int]) -> list[Words]:
        """Masks of the next token and of those behind drafts, as far as they are there."""
        known = list(self.masks)
        if not known:
            return []
        found = [known[0].words]
        for mask, behind, draft in zip(known, known[1:], drafts, strict=False):
            if mask.forced != draft or behind.over:
                break
            found.append(behind.words)
        along = self._along
        if len(found) <= len(drafts) and along.behind(self.taken, drafts):
            return [known[0].words, *along.found]
        return found

    def knows(self, drafts: Sequence[int]) -> bool:
        """Whether waiting brings none of these masks."""
        if not drafts:
            return self.ready
        along = self._along
        done = along.done and along.behind(self.taken, drafts)
        return self.ready and (done or len(self.masks_of(drafts)) > len(drafts))

    def tells_whole(self, tokens: Sequence[int]) -> bool:
        """Whether no mask is under way that `whole_with` needs."""
        known = list(self.masks)
        return len(known) > len(tokens) or any(mask.forced < 0 for mask in known)

    def whole_with(self, tokens: Sequence[int]) -> bool:
        """Whether the text is whole with these tokens behind it. Raises LimitReached.

        Only where `tells_whole`; nothing is asked afterwards.
        """
        unread = self.took(tokens)
        if not unread:
            return self.masks[0].whole
        # A worker may be copying it.
        matcher = self.matcher.copy()
        for token in unread:
            matcher.take(token)
        return matcher.whole

    # -- for workers ---------------------------------------------------------------------------

    def read(self, tokens: Sequence[int]) -> Iterator[None]:
        """Read tokens, and make the next mask and those behind it that are forced."""
        try:
            for ahead in range(MOST_AHEAD + 1):
                yield
                for token in tokens:
                    self.matcher.take(token)
                    self._read += 1
                words = np.empty_like(self._words)
                whole = self.matcher.fill(words)
                mask = self._add(words, whole=whole, may_force=ahead < MOST_AHEAD)
                if mask.forced < 0:
                    return
                tokens = [mask.forced]
        except LimitReached:
            self.end()

    def went_on(self) -> bool:
        """The matcher has read a token; whether there are enough of them for an end."""
        self._read += 1
        return self._read >= self._least

    def add(self, words: Words, allowed: int, *, whole: bool, may_force: bool) -> Mask:
        """Add a narrowed mask, behind what the matcher has read.

        Args:
            words: it.
            allowed: how many tokens it allows; of more than one, any number above.
            whole: whether the text may end there.
            may_force: whether another mask may be made behind it.
        """
        forced = -1
        if may_force and allowed == 1:
            at = int(words.argmax()) if words.max() else int(words.argmin())
            token = 32 * at + (int(words[at]) & 0xFFFFFFFF).bit_length() - 1
            # An end is no token of the text, and nothing comes behind it.
            if token not in self.ends.tokens:
                forced = token
        mask = Mask(words, forced, whole, over=not allowed)
        self._put(mask)
        return mask

    def end(self) -> None:
        """The matcher is of no use any more: there is no token behind the masks that are there."""
        self._put(Mask(np.zeros_like(self._words), -1, whole=False, over=True))

    def look_along(self, output: int, drafts: Sequence[int]) -> Iterator[None]:
        """Make masks behind drafts, the first of which is to be output number `output`.

        The matcher stays where it is: a copy goes on. It stops at a draft that is forbidden, at a
        limit, and where masks are slow.
        """
        along = self._along = _Along(output, drafts)
        known = list(self.masks)
        matcher: Matcher | None = None
        if self.taken == output and known and not self.slow:
            words = known[0].words
            for at, draft in enumerate(drafts):
                if not words[draft >> 5] >> (draft & 31) & 1:
                    break
                if matcher is None and known[at].forced == draft:
                    words = known[at + 1].words
                elif self.slow:
                    break
                else:
                    yield
                    matcher = matcher or self.matcher.copy()
                    words = self._behind(matcher, draft, output + at + 1)
                if not words.any():
                    break
                along.found.append(words)
        along.done = True

    # -- parts ---------------------------------------------------------------------------------

    def _put(self, mask: Mask) -> None:
        # First of all: the loop may take the mask at once, and ask how long the next one takes.
        self.began_at = None
        self.masks.append(mask)

    def _behind(self, matcher: Matcher, draft: int, output: int) -> Words:
        """The mask of output number `output`, behind a draft; where it fails, nothing is allowed.

        The text's own matcher will come to the same limit if the draft is right, or to none.
        """
        words = np.empty_like(self._words)
        try:
            matcher.take(draft)
            whole = matcher.fill(words)
        except BaseException:  # what the library raises when it panics is no Exception
            return np.zeros_like(words)
        self._narrow(words, may_end=whole and output >= self._least)
        return words

    def _add(self, words: Words, *, whole: bool, may_force: bool) -> Mask:
        """Add a mask, behind what the matcher has read."""
        self._narrow(words, may_end=whole and self._read >= self._least)
        allowed = int(np.bitwise_count(words.view(np.uint32)).sum())
        return self.add(words, allowed, whole=whole, may_force=may_force)

    def _narrow(self, words: Words, *, may_end: bool) -> None:
        """Put in the tokens that end the sequence, and what else the request says of tokens."""
        self.ends.put(words[None], np.zeros(1, np.int64), np.array([may_end]))
        if self.allowed is not None:
            words &= self.allowed


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Tokens that end sequences, in masks."""

    tokens: frozenset[int]
    #: [k] the words of a mask where they are, and their bits there.
    _at: npt.NDArray[np.int64]
    _bits: Words

    @staticmethod
    @lru_cache(64)
    def of(tokens: frozenset[int], words: int) -> Ends:
        """The same object for the same tokens. `words`: of a mask."""
        bits = bits_of(tokens, words)
        at = np.flatnonzero(bits)
        return Ends(tokens, at, bits[at])

    def put(
        self, masks: Words, rows: npt.NDArray[np.int64], may_end: npt.NDArray[np.bool_]
    ) -> None:
        """Allow them in some masks, or forbid them.

        Args:
            masks: [n, words].
            rows: [m] which of these.
            may_end: [m] whether they are allowed there.
        """
        where = rows[:, None], self._at
        masks[where] = np.where(
            may_end[:, None], masks[where] | self._bits, masks[where] & ~self._bits
        )


@dataclass(slots=True)
class _Along:
    """Masks along drafts, of which the first is output number `output`."""

    output: int
    drafts: Sequence[int]
    #: Behind each draft that is allowed.
    found: list[Words] = field(default_factory=list)
    done: bool = False

    def behind(self, output: int, drafts: Sequence[int]) -> bool:
        """Whether it is about these drafts."""
        return self.output == output and list(self.drafts) == list(drafts)


def bits_of(tokens: object, words: int) -> Words:
    """[words] a mask of these tokens."""
    ids = np.array(sorted(tokens), np.int64)  # type: ignore[call-overload]
    ids = ids[ids < 32 * words]
    bits = np.zeros(32 * words, np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
