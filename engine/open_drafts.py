"""Drafts that a plan leaves open, and the small steps in which a draft model finds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpod.core.branches import Tree
from tokenpod.core.plan import LAST, StepPlan

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """[N] the tokens of a step behind which a draft model guesses, small step after small step."""

    #: How many drafts are before a token: which small step it is in.
    place: Ints
    #: Which of the tokens of that.
    column: Ints
    #: Which row of the plan, and which token of the step.
    rows: Ints
    at: Ints
    #: [N, ranks] which tokens of the step follow, the likeliest first; -1: no more do.
    drafts: Ints

    @classmethod
    def by_place(cls, place: Ints, rows: Ints, at: Ints, drafts: Ints) -> Asked:
        """Of tokens in any order."""
        order = place.argsort(kind="stable")
        place, rows, at, drafts = (each[order] for each in (place, rows, at, drafts))
        return cls(place, np.arange(len(place)) - place.searchsorted(place), rows, at, drafts)

    def of(self, which: npt.NDArray[np.bool_]) -> Asked:
        """Some of them."""
        columns = (self.place, self.column, self.rows, self.at, self.drafts)
        return Asked(*(column[which] for column in columns))

    @property
    def steps(self) -> int:
        """How many small steps there are."""
        return int(self.place[-1]) + 1

    @property
    def ranks(self) -> int:
        """How many tokens follow one, at most."""
        return int((self.drafts >= 0).any(0).sum())


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
        if not plan.drafts:
            return None
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

    def asked(self, plan: StepPlan) -> Asked:
        """What small steps are made of."""
        if plan.branches is None:
            at = self.tokens - 1
            return Asked.by_place(self.places, self.rows.repeat(self.counts), at, at[:, None] + 1)
        trees = []
        for row, first in zip(self.rows.tolist(), self.firsts.tolist(), strict=True):
            end = first + int(plan.r_tokens[row])
            trees.append((row, first, Tree.of(tuple(plan.t_parent[first:end].tolist()))))
        most = max(tree.following.shape[1] for _, _, tree in trees)
        drafts = np.full((sum(len(tree.asked) for _, _, tree in trees), most), -1)
        done = 0
        for _, first, tree in trees:
            n, ranks = tree.following.shape
            drafts[done : done + n, :ranks] = tree.following + first * (tree.following >= 0)
            done += n
        return Asked.by_place(
            np.concatenate([tree.depth[tree.asked] for _, _, tree in trees]),
            self.rows.repeat([len(tree.asked) for _, _, tree in trees]),
            np.concatenate([tree.asked + first for _, first, tree in trees]),
            drafts,
        )
