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
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenpod.core.plan import LAST, UNSAMPLED
from tokenpod.scheduler.drafts.draft_choice import Choosing
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.scheduler.steps.step import Step, StepBuilder
from tokenpod.scheduler.steps.step_times import Costs

#: In steps of more rows nothing is drafted, nor watched: weights are read for many rows already.
MOST_ROWS = 64


class Drafter(Protocol):
    """Guesses what follows a sequence."""

    @property
    def watched(self) -> bool:
        """Whether guesses can be had, and compared with what comes, without drafting them."""
        ...

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow those of a sequence, all of which are known.

        `plan.LAST` stands for a token that the executor finds.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


class ModelDrafts:
    """The executor finds the tokens, with a model, a head or heads (`engine.steps.drafter`)."""

    watched = False

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """`most` tokens that the executor finds."""
        del sequence
        return [LAST] * most

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


@dataclass(slots=True)
class _Planner:
    """What is known of one planner's sequences: they are chosen for drafts among themselves."""

    choosing: Choosing
    #: Rows with drafts in steps that have not settled.
    flying: int = 0
    watching: bool = False


@dataclass(slots=True)
class Landed:
    """A sequence whose drafts have been checked, before it is given the tokens that were drawn."""

    sequence: Sequence
    drafted: int
    #: Drafts that equal what was drawn, from the first on.
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


class Drafting:
    """Decides who drafts, and how much.

    Args:
        drafter: finds the guesses.
        most: drafts of one row in a step.
        kv: of the sequences.
        costs: what steps take, learned from them; None: draft always, as much as may be.
    """

    def __init__(self, drafter: Drafter, most: int, kv: KV, costs: Costs | None = None) -> None:
        self._drafter = drafter
        self._most = most
        self._kv = kv
        self.costs = costs
        #: By the planner of sequences. Choices of one hold for its own rows alone; and those of
        #: routers, which may draft in every step, must not keep the batcher's from theirs.
        self._planners = {
            owner: _Planner(Choosing(most, costs, watched=drafter.watched)) for owner in Owner
        }
        #: By sequence id: a guess that is compared with what comes, and how much of it was right.
        self._watched: dict[int, tuple[list[int], int]] = {}

    def add_to(
        self, step: StepBuilder, sequences: list[Sequence], places: Ints
    ) -> tuple[list[Sequence], Ints, int]:
        """Add those of these to a step that have drafts; others that decode, places, tokens added.

        Of the batcher's, some may be in neither: they wait for the step that they are in. A
        router's have none in flight.

        Args:
            step: may have some drafts already.
            sequences: could decode; all of one planner's, none with drafts in flight.
            places: [n] int64, theirs.
        """
        if not sequences:
            return sequences, places, 0
        table, owner = self._kv.table, sequences[0].owner
        planner = self._planners[owner]
        may = table.drafts[places] > 0
        if not self._drafter.watched:  # masks behind drafts need to know these
            may &= table.masked[places] == 0
        few = self.costs is None or len(places) <= MOST_ROWS
        planner.watching = self.costs is not None and few and self._drafter.watched
        if not (few and may.any()):
            return sequences, places, 0
        flying = table.in_flight[places] > 0
        planner.choosing.overlaps |= bool(flying.any())
        choice = planner.choosing.choose(places, may)
        if not choice.draws.any():
            return sequences, places, 0
        plain, taken = ~choice.draws, 0
        ready = choice.draws & ~flying
        each = table.bound[places] - table.computed[places] - 1
        if owner is Owner.BATCHER and planner.flying:
            ready[:] = False
        drafting = np.flatnonzero(ready).tolist()
        for before, at in enumerate(drafting):
            sequence = sequences[at]
            # Equal shares: each has waited for the step that it was in.
            share = step.drafts_left // (len(drafting) - before)
            most = min(choice.drafts, sequence.request.drafts, int(each[at]), share)
            tokens = self._drafter.find(sequence, most) if most > 0 else []
            self._watched.pop(sequence.id, None)
            if tokens:
                step.draft(sequence, tokens)
                taken += 1 + len(tokens)
                planner.flying += 1
            else:
                plain[at] = True
        others = [sequences[at] for at in np.flatnonzero(plain).tolist()]
        return others, places[plain], taken

    def land(self, step: Step, tokens: Listing[int]) -> dict[int, Landed]:
        """A step has settled: take back what wrong drafts have computed.

        Args:
            step: none of its sequences has been given its tokens yet.
            tokens: one for each sample, row after row.

        Returns, by id, the sequences that had drafts and are not over.
        """
        found: dict[int, Landed] = {}
        for row, first in step.drafting:
            sequence = step.sequences[row]
            self._planners[sequence.owner].flying -= 1
            drafted = sequence.drafted
            sequence.drafted = 0
            if sequence.dead:
                continue
            drawn = [*tokens[first : first + 1 + drafted], UNSAMPLED]
            right = max(drawn.index(UNSAMPLED) - 1, 0)
            landed = Landed(sequence, drafted, right, len(sequence.outputs))
            if landed.wrong:
                self._kv.take_back(sequence, landed.wrong)
                sequence.launched -= landed.wrong
            self._planners[sequence.owner].choosing.odds.checked(sequence.place, drafted, right)
            found[sequence.id] = landed
        return found

    def watch(self, sequence: Sequence, token: int) -> None:
        """A token has been drawn without drafts, and is not among the sequence's yet."""
        planner = self._planners[sequence.owner]
        if (
            not planner.watching
            or sequence.dead
            or not (sequence.request.drafts and sequence.outputs)
        ):
            return
        odds = planner.choosing.odds
        guessed, right = self._watched.pop(sequence.id, ([], 0))
        guessed = guessed or self._drafter.find(sequence, self._most)
        if not guessed:
            odds.none(sequence.place)
        elif guessed[right] != token:
            odds.checked(sequence.place, len(guessed), right)
        elif right + 1 == len(guessed):
            odds.checked(sequence.place, len(guessed), right + 1)
        else:
            self._watched[sequence.id] = guessed, right + 1

    def began(self, sequences: Iterable[Sequence]) -> None:
        """Sequences exist: nothing is known of them."""
        for sequence in sequences:
            self._planners[sequence.owner].choosing.odds.reset(sequence.place)

    def forget(self, sequence: Sequence) -> None:
        """A sequence is over."""
        self._drafter.forget(sequence)
        self._watched.pop(sequence.id, None)
