"""Drafts that a plan leaves open: a draft model finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpod.core.plan import LAST, StepPlan

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The rows of a step whose drafts its executor finds with a draft model: m of them.

    What is known of such a row is its last token, or where that was sampled.
    """

    #: [m] rows of the plan, rising, and how many drafts each has.
    rows: Ints
    counts: Ints
    #: [m] which token of the step each row's first draft follows.
    firsts: Ints

    @classmethod
    def of(cls, plan: StepPlan) -> Unknown | None:
        """None: all drafts are known, if there are any."""
        drafting = plan.r_samples > 1
        ends = plan.r_tokens.cumsum()
        rows = np.flatnonzero(drafting & (plan.t_token[ends - 1] == LAST))
        if not len(rows):
            return None
        samples = plan.r_samples[rows]
        assert (plan.r_tokens[rows] == samples).all(), "before its drafts a row has one token"
        return cls(rows, samples - 1, ends[rows] - samples)

    @property
    def most(self) -> int:
        """Drafts of one row."""
        return int(self.counts.max())

    @property
    def tokens(self) -> Ints:
        """[n] which tokens of the step they are, row after row."""
        return self.firsts.repeat(self.counts) + 1 + self.places

    @property
    def places(self) -> Ints:
        """[n] of each, how many drafts of its row are before it in the step."""
        before = self.counts.cumsum() - self.counts
        return np.arange(int(self.counts.sum())) - before.repeat(self.counts)
