"""Forced tokens: the only ones that their masks allow, known before they are drawn.

A row may have them in one step, as drafts that are sure to be right. So unlike drafts they need not
wait for the step before, whose token is forced too where theirs are known; and nothing is taken
back but where the row is not sampled at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Owner, Sequence
from tokenpod.scheduler.step import StepBuilder
from tokenpod.scheduler.table import Ints


class Forced:
    """Which rows have forced tokens in the next step.

    Args:
        rows: a forced token is sampled in the place of a row that nobody has, so that steps take no
            more memory than they would with all rows.
        most: of one row in a step.
    """

    def __init__(self, rows: Rows, most: int) -> None:
        #: By sequence id: an output's number, and what it and those behind it will be.
        self.known: Mapping[int, tuple[int, list[int]]] = {}
        self.most = most
        self._rows = rows

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
        left, added = min(self._rows.free, MOST_DRAFTS), 0
        others = np.ones(len(places), bool)
        for at, sequence in enumerate(sequences):
            if (known := self.known.get(sequence.id)) is None:
                continue
            if tokens := self._next(sequence, *known)[:left]:
                step.draft(sequence, tokens, forced=True)
                others[at] = False
                left -= len(tokens)
                added += 1 + len(tokens)
        if not added:
            return sequences, places, 0
        return [sequences[at] for at in np.flatnonzero(others).tolist()], places[others], added

    def _next(self, sequence: Sequence, first: int, tokens: list[int]) -> list[int]:
        """What is forced behind a sequence's next position, as much as a step may have."""
        most = min(self.most, sequence.bound - sequence.computed - 1)
        if sequence.owner is Owner.ROUTER:
            most = min(most, sequence.request.drafts)
        # Outputs that are in flight are forced as well: they are among these.
        return tokens[sequence.launched - first :][: max(most, 0)]
