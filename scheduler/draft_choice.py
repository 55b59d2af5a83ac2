"""Whether drafts pay: who has them, how many, and whether in a chain or a tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenpod.core.branches import MOST_BRANCHES
from tokenpod.scheduler.odds import Floats, Odds
from tokenpod.scheduler.step_times import Costs
from tokenpod.scheduler.table import Ints
from tokenpod.scheduler.tree_shapes import CHANCES, Shape, depth_of, tree_of

Flags = npt.NDArray[np.bool_]

#: Drafting must promise so much more than not drafting.
_MARGIN = 1.02
#: Steps of the same rows for which a choice holds; and those whose times show what drafts cost.
_CHOICE_HOLDS = 8
_TRIALS = 4
#: Guesses that are watched before any is drafted.
_WATCHED_FIRST = 8
#: A source that can't be watched is judged after so many steps with so many drafts of a row: the
#: first ones may be slow (memory is taken, kernels are loaded), and of a size the shortest counts.
_TRIES = 3
_TRIED_WITH = 2
#: One that was found not to pay is tried again after so many choices, each time after twice as
#: many, up to the last number; trees are after that.
_TRIED_SOON, _TRIED_AGAIN = 32, 256
#: How much one choice changes what trees are taken to promise beside chains: the shares of right
#: guesses that both follow from are those of the last few dozen.
_SMOOTHING = 1 / 8
#: Right drafts of trees that are counted as expected from the beginning, and how many count.
_PRIOR, _WINDOW = 32.0, 512.0
#: Tokens of a step with trees: up to that many, each is a row of its own for attention on a GPU.
_MOST_TREE_TOKENS = MOST_BRANCHES


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is to draft, how much at most; for whom that was decided, and for how many steps."""

    draws: Flags
    #: Drafts of a row, of which so many are behind each other: all of them, if it is no tree.
    drafts: int
    depth: int
    places: Ints
    holds: int

    @property
    def is_tree(self) -> bool:
        """Whether a draft may be followed by several."""
        return self.drafts > self.depth


class Choosing:
    """Decides from what steps take and how often guesses come true.

    Args:
        most: drafts of one row that are behind each other.
        tree: drafts of a tree, at most; 0: there are none.
        watched: whether guesses are compared with what comes while nothing is drafted.
        costs: what steps take; None: draft always, as much as may be.
    """

    def __init__(self, most: int, tree: int, costs: Costs | None, *, watched: bool) -> None:
        self._most, self._tree, self._costs, self._watched = most, tree, costs, watched
        #: Trees to choose from, the smallest first: one that is twice as large as any step before
        #: is taken to cost as much more.
        self._shapes: list[Shape] = []
        while tree > most:
            self._shapes.insert(0, tree_of(tree, most))
            tree = (tree + most) // 2
        #: Of chains, which trees begin with, and of trees.
        self.odds, self.trees = Odds(hopeful=not watched), TreeOdds()
        #: Whether steps are launched before the one before has settled.
        self.overlaps = False
        #: Choices since something was drafted, and after how many it is tried again.
        self._idle, self._patience = 0, _TRIED_SOON
        #: Choices since a tree was drafted; what trees promise, in times of chains; 0: unknown.
        self._without_tree, self._lead = 0, 0.0
        self._last: Choice | None = None
        #: Choices with drafts since there was one without, and with trees.
        self._streak = self._tree_streak = 0

    def choose(self, places: Ints, may: Flags) -> Choice:
        """For the next step of these [n] places, of which those that `may` could have drafts."""
        last = self._last
        if last is None or not last.holds or not np.array_equal(last.places, places):
            draws, drafts, depth = self._choose(places, may)
            self._streak = self._streak + 1 if draws.any() else 0
            self._tree_streak = self._tree_streak + 1 if drafts > depth else 0
            tried = 0 < self._streak <= _TRIALS or 0 < self._tree_streak <= _TRIALS
            last = Choice(draws, drafts, depth, places, 1 if tried else _CHOICE_HOLDS)
        self._last = Choice(last.draws, last.drafts, last.depth, places, last.holds - 1)
        return last

    def _choose(self, places: Ints, may: Flags) -> tuple[Flags, int, int]:
        """[n] who is to draft, how many tokens at most, and how many behind each other."""
        if self._costs is None:
            return may, self._tree or self._most, self._most
        least, nothing = self._costs.plain(len(places)) * _MARGIN, (np.zeros_like(may), 0, 0)
        if least == 0 or (self._watched and self.odds.cases < _WATCHED_FIRST):
            return nothing
        if not self._watched:
            if self._idle >= self._patience:
                self.odds, self._idle, self._costs.tries = Odds(hopeful=True), 0, 0
                self._patience = min(2 * self._patience, _TRIED_AGAIN)
            if self._costs.tries < _TRIES:
                few = min(_TRIED_WITH, self._most)
                return may, few, few
        # A source that is watched does what pays even if chance was kind. Nothing would be learned
        # of a draft model that is given up, so it does what is likely to pay most.
        best, chosen = least, nothing
        odds = self.odds.of(places, cautious=self._watched)
        for most in sorted({1, 2, 3, *range(4, self._most, 2), self._most}):
            if most > self._most:
                continue
            gain = odds[0], _gain_of_chain(most, odds)
            rate, draws = self._rate(len(places), may, gain, most, most)
            if rate > best:
                best, chosen = rate, (draws, most, most)
        if self._shapes:
            chosen = self._tree_if_better(places, may, chosen, best)
        self._idle = 0 if chosen[1] else self._idle + 1
        if self._streak > _TRIALS:
            self._patience = _TRIED_SOON
        return chosen

    def _tree_if_better(
        self, places: Ints, may: Flags, chosen: tuple[Flags, int, int], best: float
    ) -> tuple[Flags, int, int]:
        """The same, or the tree that promises most, if that is more than `best` as a rule.

        `best`: tokens per nanosecond.
        """
        self._without_tree += 1
        if self._without_tree > _TRIED_AGAIN:
            self.trees, self._without_tree, self._lead = TreeOdds(), 0, 0.0
        odds, most, tree = self.odds.of(places, cautious=False), 0.0, chosen
        for shape in self._shapes:
            gain = self.trees.fit * gain_of(shape, odds)
            depth, drafts = depth_of(shape), len(shape)
            rate, draws = self._rate(len(places), may, (odds[0], gain), depth, drafts)
            if len(places) + int(draws.sum()) * drafts > _MOST_TREE_TOKENS:
                continue
            if rate > most and draws.any():
                most, tree = rate, (draws, drafts, depth)
        lead = most / best
        self._lead += (lead - self._lead) * (_SMOOTHING if self._lead else 1.0)
        if self._lead <= _MARGIN or not most:
            return chosen
        self._without_tree = 0
        return tree

    def _rate(
        self, n: int, may: Flags, odds: tuple[Floats, Floats], depth: int, drafts: int
    ) -> tuple[float, Flags]:
        """Tokens per nanosecond if who gains by up to `drafts` has them, and who that is.

        `odds`: how often there are guesses for each, and how many of these are right.
        """
        assert self._costs is not None
        some, right = odds
        gain, cost = some * right, some * drafts
        price = self._costs.price(n, float(cost[may].sum()))
        draws = may & (gain > cost * price)
        drafting = int(draws.sum())
        if not drafting:
            return 0.0, draws
        tokens, more = n + float(cost[draws].sum()), float(gain[draws].sum())
        others = n - drafting
        took = self._costs.of(tokens) + self._costs.finding(drafting * drafts / depth, depth)
        if not self.overlaps:
            return (n + more) / took, draws
        if not others:
            return (n + more) / (took + self._costs.gap), draws
        # While the rows with drafts wait for their step, the others are in another one.
        twice = took + self._costs.of(others, drafts=False)
        return (drafting + more + 2 * others) / twice, draws


def gain_of(shape: Shape, odds: tuple[Floats, Floats, Floats]) -> Floats:
    """[n] how many drafts of a shape are right, where there are any.

    The likeliest guesses are as often as `odds` say; the others share what these leave, as usual.
    """
    _, first, further = odds
    right, seen = [np.ones_like(first)], [0] * (1 + len(shape))
    for parent in shape:
        likeliest = further if parent else first
        rank, seen[parent] = seen[parent], seen[parent] + 1
        share = CHANCES[rank] / (1 - CHANCES[0])
        right.append(right[parent] * ((1 - likeliest) * share if rank else likeliest))
    gain: Floats = np.sum(right[1:], axis=0)
    return gain


def _gain_of_chain(most: int, odds: tuple[Floats, Floats, Floats]) -> Floats:
    """The same of a chain."""
    _, first, further = odds
    gain: Floats = first * (1 - further**most) / (1 - further)
    return gain


class TreeOdds:
    """How many drafts of trees were right, beside how many were expected to be."""

    def __init__(self) -> None:
        self._right = self._expected = _PRIOR

    @property
    def fit(self) -> float:
        """The one over the other."""
        return self._right / self._expected

    def checked(self, expected: float, right: int) -> None:
        """A tree of which so many drafts were expected to be right."""
        self._right, self._expected = self._right + right, self._expected + expected
        if self._expected >= _WINDOW:
            self._right, self._expected = self._right / 2, self._expected / 2
