"""Forced tokens: the only ones that their masks allow, known before they are drawn.

A row may have them in one step, as drafts that are sure to be right. So unlike drafts they need not
wait for the step before, whose token is forced too where theirs are known; and nothing is taken
back but where the row is not sampled at all.

A step with several tokens of a row may take longer than one without, by more than these tokens are
worth: on a GPU it is another graph with more logits. So times of both are learned, as of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.table import Ints
from tokenpod.scheduler.steps.step import StepBuilder
from tokenpod.scheduler.steps.step_times import Costs


class Forced:
    """Which rows have forced tokens in the next step.

    Args:
        most: of one row in a step.
        costs: what steps under constraints take, learned from them; None: take all that are forced.
    """

    def __init__(self, most: int, costs: Costs | None = None) -> None:
        #: By sequence id: an output's number, and what it and those behind it will be.
        self.known: Mapping[int, tuple[int, list[int]]] = {}
        self.most = most
        self._costs = costs

    def add_to(
        self, step: StepBuilder, sequences: list[Sequence], places: Ints
    ) -> tuple[list[Sequence], Ints, int]:
        """Add those of these to a step that have forced tokens; the others, places, tokens added.

        Args:
            sequences: decode in the next step.
            places: [n] int64, theirs.
        """
        if not (self.known and self.most):
            return sequences, places, 0
        found: dict[int, list[int]] = {}
        left = step.forced_left
        for at, sequence in enumerate(sequences):
            if tokens := self.find(sequence, left):
                found[at] = tokens
                left -= len(tokens)
        more = sum(map(len, found.values()))
        if not more or not self._pays(len(sequences), more):
            return sequences, places, 0
        for at, tokens in found.items():
            step.draft(sequences[at], tokens, forced=True)
        others = [at for at in range(len(sequences)) if at not in found]
        return [sequences[at] for at in others], places[others], more + len(found)

    def _pays(self, rows: int, more: int) -> bool:
        """Whether a step with so many forced tokens besides those of rows makes more of its time.

        Without forced tokens one is timed first; with them the first is taken to be as good.
        """
        if self._costs is None:
            return True
        plain = self._costs.plain(rows)
        return plain > 0 and (rows + more) / self._costs.of(rows + more) >= plain

    def find(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that are forced behind a sequence's next position."""
        if (known := self.known.get(sequence.id)) is None:
            return []
        first, tokens = known
        most = min(most, self.most, sequence.bound - sequence.computed - 1)
        if sequence.owner is Owner.ROUTER:
            most = min(most, sequence.request.drafts)
        # Outputs that are in flight are forced as well: they are among these.
        return tokens[sequence.launched - first :][: max(most, 0)]
