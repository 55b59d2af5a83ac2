"""What a step computes of a sequence, where that is more than the token that it sampled last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenpod.core.plan import LAST, Ints
from tokenpod.core.positions import axes_of
from tokenpod.scheduler.pool.given import vectors_of
from tokenpod.scheduler.pool.radix import Slots, Tokens
from tokenpod.scheduler.sequences.sequence import Sequence


@dataclass(slots=True)
class Piece:
    """Some of the tokens that a sequence needs computed, or its last one with drafts behind it."""

    sequence: Sequence
    start: int
    slots: Slots
    drafts: list[int] = field(default_factory=list)
    #: The drafts are sure to be right.
    forced: bool = False

    @property
    def tokens(self) -> Tokens:
        """[n] their ids, int32; `LAST` where a draft follows what was sampled last."""
        if self.drafts:
            return np.array([LAST, *self.drafts], np.int32)
        return self.sequence.inputs[self.start : self.start + len(self.slots)]

    @property
    def scored(self) -> bool:
        """Whether log probabilities of `following` are wanted."""
        return self.sequence.scored

    @property
    def following(self) -> Tokens:
        """The token after each of `tokens`, as far as the prompt goes."""
        following = self.sequence.inputs[self.start + 1 : self.start + 1 + len(self.slots)]
        return np.maximum(following, 0)  # a given embedding has no id, and so no probability

    @property
    def embeds(self) -> bool:
        """Whether some of the prompt's positions have an embedding in place of an id."""
        return bool(self.sequence.request.given or self.sequence.request.virtual_tokens)

    @property
    def given(self) -> list[Any]:
        """[m, width] each: the embeddings that are given instead of `tokens`."""
        return vectors_of(self.sequence.request, self.start, self.start + len(self.slots))

    @property
    def axes(self) -> Ints | None:
        """[3, n] int32: positions of `tokens`; None: places plus the request's shift."""
        return axes_of(self.sequence.request, self.start, self.start + len(self.slots))

    @property
    def mutual(self) -> bool:
        """Whether its tokens see each other: they are all that is left of a span."""
        return any(start <= self.start < end for start, end in self.sequence.spans)


class ChosenToken(Piece):
    """The last output of a beam, which was chosen among those of all."""

    __slots__ = ()

    @property
    def tokens(self) -> Tokens:
        """[1] that output."""
        return np.array(self.sequence.outputs[-1:], np.int32)

    @property
    def scored(self) -> bool:
        """No."""
        return False
