"""Whether drafts pay: who has them, and how many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.drafts.odds import Floats, Odds
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.scheduler.steps.step_times import Costs

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
#: many, up to the last number.
_TRIED_SOON, _TRIED_AGAIN = 32, 256


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is to draft, how much at most; for whom that was decided, and for how many steps."""

    draws: Flags
    #: Of a row.
    drafts: int
    places: Ints
    holds: int


class Choosing:
    """Decides from what steps take and how often guesses come true.

    Args:
        most: drafts of one row.
        watched: whether guesses are compared with what comes while nothing is drafted.
        costs: what steps take; None: draft always, as much as may be.
    """

    def __init__(self, most: int, costs: Costs | None, *, watched: bool) -> None:
        self._most, self._costs, self._watched = most, costs, watched
        self.odds = Odds(hopeful=not watched)
        #: Whether steps are launched before the one before has settled.
        self.overlaps = False
        #: Choices since something was drafted, and after how many it is tried again.
        self._idle, self._patience = 0, _TRIED_SOON
        self._last: Choice | None = None
        #: Choices with drafts since there was one without.
        self._streak = 0

    def choose(self, places: Ints, may: Flags) -> Choice:
        """For the next step of these [n] places, of which those that `may` could have drafts."""
        last = self._last
        if last is None or not last.holds or not np.array_equal(last.places, places):
            draws, drafts = self._choose(places, may)
            self._streak = self._streak + 1 if draws.any() else 0
            tried = 0 < self._streak <= _TRIALS
            last = Choice(draws, drafts, places, 1 if tried else _CHOICE_HOLDS)
        self._last = replace(last, holds=last.holds - 1)
        return last

    def _choose(self, places: Ints, may: Flags) -> tuple[Flags, int]:
        """[n] who is to draft, and how many tokens at most."""
        if self._costs is None:
            return may, self._most
        least, nothing = self._costs.plain(len(places)) * _MARGIN, (np.zeros_like(may), 0)
        if least == 0 or (self._watched and self.odds.cases < _WATCHED_FIRST):
            return nothing
        if not self._watched:
            if self._idle >= self._patience:
                self.odds, self._idle, self._costs.tries = Odds(hopeful=True), 0, 0
                self._patience = min(2 * self._patience, _TRIED_AGAIN)
            if self._costs.tries < _TRIES:
                return may, min(_TRIED_WITH, self._most)
        # A source that is watched does what pays even if chance was kind. Nothing would be learned
        # of a draft model that is given up, so it does what is likely to pay most.
        best, chosen = least, nothing
        odds = self.odds.of(places, cautious=self._watched)
        for most in sorted({1, 2, 3, *range(4, self._most, 2), self._most}):
            if most > self._most:
                continue
            rate, draws = self._rate(len(places), may, odds, most)
            if rate > best:
                best, chosen = rate, (draws, most)
        self._idle = 0 if chosen[1] else self._idle + 1
        if self._streak > _TRIALS:
            self._patience = _TRIED_SOON
        return chosen

    def _rate(
        self, n: int, may: Flags, odds: tuple[Floats, Floats, Floats], drafts: int
    ) -> tuple[float, Flags]:
        """Tokens per nanosecond if who gains by up to `drafts` has them, and who that is.

        `odds`: [n] each, the shares that `Odds.of` gives.
        """
        assert self._costs is not None
        some, first, further = odds
        right = first * (1 - further**drafts) / (1 - further)
        gain, cost = some * right, some * drafts
        price = self._costs.price(n, float(cost[may].sum()))
        draws = may & (gain > cost * price)
        drafting = int(draws.sum())
        if not drafting:
            return 0.0, draws
        tokens, more = n + float(cost[draws].sum()), float(gain[draws].sum())
        others = n - drafting
        took = self._costs.of(tokens) + self._costs.finding(drafting, drafts)
        if not self.overlaps:
            return (n + more) / took, draws
        if not others:
            return (n + more) / (took + self._costs.gap), draws
        # While the rows with drafts wait for their step, the others are in another one.
        twice = took + self._costs.of(others, drafts=False)
        return (drafting + more + 2 * others) / twice, draws
