"""Drafts: guesses of the tokens that come next, which one step checks together.

A row with drafts is sampled at each of them (`StepPlan.r_samples`) and keeps what was drawn as long
as the draft before was right; so drafts never change tokens, only how many a step brings.

A source can guess only what follows tokens that it knows, so a row waits until the step that it is
in has settled: rows with drafts give up overlap, others don't. They all go into one step, or each
would read the weights for itself. Whether it pays is decided from what steps take and from how
often guesses have come true, which is watched while nothing is drafted, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.plan import LAST, UNSAMPLED
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.odds import Floats, Odds
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step import Step
from tokenpod.scheduler.step_times import Costs
from tokenpod.scheduler.table import Ints

Flags = npt.NDArray[np.bool_]

#: In steps of more rows nothing is drafted, nor watched: weights are read for many rows already.
MOST_ROWS = 64
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
#: One that was found not to pay is tried again after so many choices.
_TRIED_AGAIN = 256


class DraftSource(Protocol):
    """Guesses what follows."""

    @property
    def watched(self) -> bool:
        """Whether guesses can be had, and compared with what comes, without drafting them."""
        ...

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow those of a sequence, all of which are known.

        `plan.LAST` stands for a token that the executor finds.
        """

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


class ModelDrafts:
    """A source whose guesses the executor makes, with a draft model."""

    watched = False

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """See `DraftSource`."""
        del sequence
        return [LAST] * most

    def forget(self, sequence: Sequence) -> None:
        """See `DraftSource`."""


@dataclass(slots=True)
class Split:
    """What a planner adds to a step of those that decode; the others wait for their last step."""

    sequences: list[Sequence]
    #: [n] their places.
    places: Ints
    #: Sequences and what may follow their last token, at least one token each.
    drafts: list[tuple[Sequence, list[int]]] = field(default_factory=list)


@dataclass(slots=True)
class Landed:
    """A sequence whose drafts have been checked, before it is given the tokens that were drawn."""

    sequence: Sequence
    drafted: int
    #: Drafts that equal what was drawn: the first ones.
    right: int
    #: Outputs that it had.
    outputs: int

    @property
    def wrong(self) -> int:
        """Drafts that do not count."""
        return self.drafted - self.right

    @property
    def accepted(self) -> int:
        """Drafts that are outputs now: one may have ended the sequence."""
        return min(self.right, len(self.sequence.outputs) - self.outputs)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Who is to draft, how much at most; for whom that was decided, and for how many steps."""

    draws: Flags
    most: int
    places: Ints
    holds: int


class Drafting:
    """Decides who drafts, and how much.

    Args:
        source: of guesses.
        most: drafts of one row in a step.
        kv: of the sequences.
        costs: what steps take, learned from them; None: draft always, as much as may be.
    """

    def __init__(self, source: DraftSource, most: int, kv: KV, costs: Costs | None = None) -> None:
        self._source = source
        self._most = most
        self._kv = kv
        self._costs = costs
        #: Rows with drafts in steps that have not settled.
        self._flying = 0
        #: Whether steps are launched before the one before has settled.
        self._overlaps = False
        self._watching = False
        self._odds = Odds(hopeful=not source.watched)
        #: Choices since something was drafted.
        self._idle = 0
        #: Steps with drafts whose times are known, since the source was last taken to be good.
        self._tries = 0
        self._choice: _Choice | None = None
        #: Steps with drafts since there was one without.
        self._streak = 0
        #: By sequence id: a guess that is compared with what comes, and how much of it was right.
        self._watched: dict[int, tuple[list[int], int]] = {}

    def split(
        self,
        sequences: list[Sequence],
        places: Ints,
        *,
        wait: bool = True,
        room: int = MOST_DRAFTS,
    ) -> Split:
        """Who of these decodes in the next step, with which drafts.

        Args:
            sequences: could decode; none of them has drafts in flight.
            places: [n] int64, theirs.
            wait: whether some may be in none of the parts; else none has a step in flight.
            room: drafts of all of them, at most.
        """
        table = self._kv.table
        may = table.drafts[places] > 0
        if not self._source.watched:  # masks behind drafts need to know these
            may &= table.masked[places] == 0
        few = self._costs is None or len(places) <= MOST_ROWS
        self._watching = self._costs is not None and few and self._source.watched
        if not (few and may.any()):
            return Split(sequences, places)
        flying = table.in_flight[places] > 0
        self._overlaps = self._overlaps or bool(flying.any())
        choice = self._chosen(places, may)
        if not choice.draws.any():
            return Split(sequences, places)
        plain = ~choice.draws
        split = Split([], places)
        ready = choice.draws & ~flying
        each = np.minimum(table.bound[places] - table.computed[places] - 1, table.drafts[places])
        left = max(room, 0)
        if wait and self._flying:
            ready[:] = False
        for at in np.flatnonzero(ready).tolist():
            n = min(choice.most, int(each[at]), left)
            tokens = self._source.propose(sequences[at], n) if n > 0 else []
            self._watched.pop(sequences[at].id, None)
            if tokens:
                split.drafts.append((sequences[at], tokens))
                left -= len(tokens)
            else:
                plain[at] = True
        self._flying += len(split.drafts)
        split.places = places[plain]
        split.sequences = [sequences[at] for at in np.flatnonzero(plain).tolist()]
        return split

    def land(
        self, step: Step, tokens: Listing[int], took: int, drafting_ns: int = 0
    ) -> dict[int, Landed]:
        """A step has settled: take back what wrong drafts have computed.

        Args:
            step: none of its sequences has been given its tokens yet.
            tokens: see `Scheduler.settle`.
            took: nanoseconds.
            drafting_ns: of these, what the executor has taken to find drafts.

        Returns, by id, the sequences that had drafts and are not over.
        """
        found: dict[int, Landed] = {}
        if self._costs is not None and not step.prompt_tokens:
            drafts = step.plan.drafts > 0
            self._costs.note(step.plan.tokens, took - drafting_ns, drafts=drafts, gap=step.gap)
            self._tries += drafts
            if drafting_ns:
                most = max(int(step.plan.r_samples[row]) for row, _ in step.drafting) - 1
                self._costs.note_small(len(step.drafting), drafting_ns // most)
        for row, first in step.drafting:
            self._flying -= 1
            sequence = step.sequences[row]
            drafted = sequence.drafted
            sequence.drafted = 0
            if sequence.dead:
                continue
            drawn = [*tokens[first + 1 : first + 1 + drafted], UNSAMPLED]
            landed = Landed(sequence, drafted, drawn.index(UNSAMPLED), len(sequence.outputs))
            if landed.wrong:
                self._kv.take_back(sequence, landed.wrong)
                sequence.launched -= landed.wrong
            self._odds.checked(sequence.place, drafted, landed.right)
            found[sequence.id] = landed
        return found

    def watch(self, sequence: Sequence, token: int) -> None:
        """A token has been drawn without drafts, and is not among the sequence's yet."""
        if (
            not self._watching
            or sequence.dead
            or not (sequence.request.drafts and sequence.outputs)
        ):
            return
        guessed, right = self._watched.pop(sequence.id, ([], 0))
        guessed = guessed or self._source.propose(sequence, self._most)
        if not guessed:
            self._odds.none(sequence.place)
        elif guessed[right] != token:
            self._odds.checked(sequence.place, len(guessed), right)
        elif right + 1 == len(guessed):
            self._odds.checked(sequence.place, len(guessed), right + 1)
        else:
            self._watched[sequence.id] = guessed, right + 1

    def began(self, sequences: Iterable[Sequence]) -> None:
        """Sequences exist: nothing is known of them."""
        for sequence in sequences:
            self._odds.reset(sequence.place)

    def forget(self, sequence: Sequence) -> None:
        """A sequence is over."""
        self._source.forget(sequence)
        self._watched.pop(sequence.id, None)

    # -- whether it pays -----------------------------------------------------------------------

    def _chosen(self, places: Ints, may: Flags) -> _Choice:
        last = self._choice
        if last is None or not last.holds or not np.array_equal(last.places, places):
            draws, most = self._choose(places, may)
            self._streak = self._streak + 1 if draws.any() else 0
            holds = 1 if 0 < self._streak <= _TRIALS else _CHOICE_HOLDS
            last = _Choice(draws, most, places, holds)
        self._choice = _Choice(last.draws, last.most, places, last.holds - 1)
        return last

    def _choose(self, places: Ints, may: Flags) -> tuple[Flags, int]:
        """[n] who is to draft, and how many tokens at most."""
        if self._costs is None:
            return may, self._most
        best, chosen = self._costs.plain(len(places)) * _MARGIN, (np.zeros_like(may), 0)
        if best == 0 or (self._source.watched and self._odds.cases < _WATCHED_FIRST):
            return chosen
        if not self._source.watched:
            if self._idle >= _TRIED_AGAIN:
                self._odds, self._idle, self._tries = Odds(hopeful=True), 0, 0
            if self._tries < _TRIES:
                return may, min(_TRIED_WITH, self._most)
        odds = self._odds.of(places)
        for most in sorted({1, 2, 3, *range(4, self._most, 2), self._most}):
            if most <= self._most:
                rate, draws = self._rate(len(places), may, odds, most)
                if rate > best:
                    best, chosen = rate, (draws, most)
        self._idle = 0 if chosen[1] else self._idle + 1
        return chosen

    def _rate(
        self, n: int, may: Flags, odds: tuple[Floats, Floats, Floats], most: int
    ) -> tuple[float, Flags]:
        """Tokens per nanosecond if who gains by up to `most` drafts has them, and who that is."""
        assert self._costs is not None
        some, first, further = odds
        gain = some * first * (1 - further**most) / (1 - further)
        cost = some * most
        price = self._costs.price(n, float(cost[may].sum()))
        draws = may & (gain > cost * price)
        drafting = int(draws.sum())
        if not drafting:
            return 0.0, draws
        tokens, more = n + float(cost[draws].sum()), float(gain[draws].sum())
        others = n - drafting
        took = self._costs.of(tokens) + most * self._costs.small(drafting)
        if not self._overlaps:
            return (n + more) / took, draws
        if not others:
            return (n + more) / (took + self._costs.gap), draws
        # While the rows with drafts wait for their step, the others are in another one.
        twice = took + self._costs.of(others, drafts=False)
        return (drafting + more + 2 * others) / twice, draws
