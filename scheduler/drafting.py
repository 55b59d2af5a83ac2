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
from typing import NamedTuple, Protocol, cast

import numpy as np

from tokenpod.core.plan import LAST, UNSAMPLED
from tokenpod.scheduler.draft_choice import Choice, Choosing, gain_of
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.step_times import Costs
from tokenpod.scheduler.table import Ints
from tokenpod.scheduler.tree_shapes import (
    Shape,
    depth_of,
    is_chain,
    tree_of,
    way_along,
    widths_of,
)

#: In steps of more rows nothing is drafted, nor watched: weights are read for many rows already.
MOST_ROWS = 64


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


class TreeSource(DraftSource, Protocol):
    """Guesses several tokens for a place."""

    def propose_tree(self, sequence: Sequence, shape: Shape) -> list[int]:
        """A token for each draft of a tree; those that follow the same one are different.

        `plan.LAST` stands for tokens that the executor finds.
        """
        ...


class Guess(NamedTuple):
    """A sequence and what may follow its last token: at least one token."""

    sequence: Sequence
    tokens: list[int]
    #: Which follows which; empty: each the one before it.
    shape: Shape = ()


class ModelDrafts:
    """A source whose guesses the executor makes, with a draft model."""

    watched = False

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """See `DraftSource`."""
        del sequence
        return [LAST] * most

    def propose_tree(self, sequence: Sequence, shape: Shape) -> list[int]:
        """See `TreeSource`."""
        del sequence
        return [LAST] * len(shape)

    def forget(self, sequence: Sequence) -> None:
        """See `DraftSource`."""


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
    #: Drafts, by how many drafts are before them.
    widths: tuple[int, ...]
    #: Drafts that equal what was drawn: those behind each other from the first on.
    right: int
    #: Outputs that it had.
    outputs: int

    @property
    def drafted(self) -> int:
        """Drafts in all."""
        return sum(self.widths)

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
        source: of guesses.
        most: drafts of one row in a step that are behind each other.
        kv: of the sequences.
        costs: what steps take, learned from them; None: draft always, as much as may be.
        tree: drafts of one row in a step where they are a tree, more than `most`, of a source that
            can find these; 0: they never are.
    """

    def __init__(
        self,
        source: DraftSource,
        most: int,
        kv: KV,
        costs: Costs | None = None,
        *,
        tree: int = 0,
    ) -> None:
        self._source = source
        self._most = most
        self._kv = kv
        self._costs = costs
        #: By the planner of sequences. Choices of one hold for its own rows alone; and those of
        #: routers, which may draft in every step, must not keep the batcher's from theirs.
        self._planners = {
            owner: _Planner(Choosing(most, tree, costs, watched=source.watched)) for owner in Owner
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
        if not self._source.watched:  # masks behind drafts need to know these
            may &= table.masked[places] == 0
        few = self._costs is None or len(places) <= MOST_ROWS
        planner.watching = self._costs is not None and few and self._source.watched
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
            # Equal shares: each has waited for the step that it was in.
            most = min(int(each[at]), step.drafts_left // (len(drafting) - before))
            guess = self._guess(sequences[at], choice, most, step.branches_left)
            self._watched.pop(sequences[at].id, None)
            if guess.tokens:
                step.draft(guess.sequence, guess.tokens, shape=guess.shape)
                taken += 1 + len(guess.tokens)
                planner.flying += 1
            else:
                plain[at] = True
        others = [sequences[at] for at in np.flatnonzero(plain).tolist()]
        return others, places[plain], taken

    def _guess(self, sequence: Sequence, choice: Choice, most: int, branches: int) -> Guess:
        """Up to `most` drafts, and in a tree up to so many; none: there is no guess."""
        depth = min(choice.depth, sequence.request.drafts)
        # Trees that are less deep are broader: more drafts follow one token than there is room for.
        if choice.is_tree and depth == choice.depth and not sequence.constrained:
            shape = tree_of(min(choice.drafts, most), depth)
            if len(shape) <= branches and not is_chain(shape):
                source = cast(TreeSource, self._source)
                return Guess(sequence, source.propose_tree(sequence, shape), shape)
        n = min(depth, most)
        return Guess(sequence, self._source.propose(sequence, n) if n > 0 else [])

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
            n = step.plan.drafts
            self._costs.note(step.plan.tokens, took - drafting_ns, drafts=n > 0, gap=step.gap)
            if drafting_ns:
                most = max(depth_of(step.shape_of(row)) for row, _ in step.drafting)
                self._costs.note_finding(-(-n // most), most, drafting_ns)
        for row, first in step.drafting:
            sequence = step.sequences[row]
            self._planners[sequence.owner].flying -= 1
            drafted = sequence.drafted
            sequence.drafted = 0
            if sequence.dead:
                continue
            drawn = [*tokens[first : first + 1 + drafted], UNSAMPLED]
            way = self._keep(step, row, drawn[: max(drawn.index(UNSAMPLED), 1)])
            widths = widths_of(step.shape_of(row))
            landed = Landed(sequence, widths, len(way), len(sequence.outputs))
            if landed.wrong:
                self._kv.take_back(sequence, landed.wrong)
                sequence.launched -= landed.wrong
            self._note(sequence, step.shape_of(row), way)
            found[sequence.id] = landed
        return found

    def _keep(self, step: Step, row: int, drawn: list[int]) -> list[int]:
        """Have what right drafts have computed lie where a chain's would; their numbers, from 1."""
        shape = step.shape_of(row)
        if is_chain(shape):
            return [*range(1, len(drawn))]
        end = int(step.plan.r_tokens[: row + 1].sum())
        way = way_along(shape, step.plan.t_token[end - len(shape) : end].tolist(), drawn)
        slots = step.plan.t_slot[end - len(shape) - 1 : end].tolist()
        for at, number in enumerate(way, 1):
            if number != at:
                self._kv.pool.move(slots[number], slots[at])
        return way

    def _note(self, sequence: Sequence, shape: Shape, way: list[int]) -> None:
        """Note how many of a row's drafts were right, of a tree's also how many of its trunk."""
        choosing, place = self._planners[sequence.owner].choosing, sequence.place
        right, depth = len(way), depth_of(shape)
        if not is_chain(shape):
            odds = choosing.odds.of(np.array([place]), cautious=False)
            choosing.trees.checked(float(gain_of(shape, odds)[0]), right)
            right = sum(number == at for at, number in enumerate(way, 1))
        choosing.odds.checked(place, depth, right)

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
        guessed = guessed or self._source.propose(sequence, self._most)
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
        self._source.forget(sequence)
        self._watched.pop(sequence.id, None)
