"""Which rows' drafts have been found before their step was planned.

Between two steps of a row the device would wait for the host, which has to see what was drawn, plan
and launch. But what a draft model needs is on the device: the last token, and how many drafts were
right. So it guesses for the next step behind each one, before the host has seen anything of it, and
computes meanwhile.

    device   check n | draw | follow | find drafts of n + 1 | check n + 1
    host                    settle n, plan and launch n + 1

What was found is used if the rows go on, with as many drafts or fewer; else it was in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from tokenpod.core.plan import StepPlan
from tokenpod.engine.steps.mailbox import Mark
from tokenpod.engine.steps.open_drafts import Ints, Unknown


@dataclass(frozen=True, slots=True)
class Before:
    """The rows of a step with drafts, for whose next step as many are found: m of them."""

    #: [m] of the sampler and the row table.
    rows: Ints
    #: [m] each, of the step: its drafts, and the position and the output number that it begins at.
    counts: Ints
    starts: Ints
    outputs: Ints

    @classmethod
    def of(cls, plan: StepPlan, unknown: Unknown | None, positions: int) -> Before | None:
        """None: nothing is found for any.

        That is where some row waits for its mask: it has not been drawn yet. `positions`: of the
        longest sequence; all drafts may be right, and as many follow.
        """
        if unknown is None or len(plan.r_masked):
            return None
        rows, counts = unknown.rows, unknown.counts
        fits = plan.r_start[rows] + 2 * counts < positions
        rows, counts = rows[fits], counts[fits]
        if not len(rows):
            return None
        return cls(plan.r_row[rows], counts, plan.r_start[rows], plan.r_output[rows])


@dataclass(frozen=True, slots=True)
class _Found:
    """Drafts of a row, behind a step that began so."""

    column: int
    count: int
    start: int
    output: int

    def serves(self, start: int, output: int, count: int) -> bool:
        """Whether the row's next step begins with them."""
        further = start - self.start
        return count <= self.count >= further - 1 >= 0 and further == output - self.output


class Ahead:
    """Remembers what was found; all ranks of a group come to the same, by their plans."""

    def __init__(self, *, on_gpu: bool) -> None:
        #: By row.
        self._found: dict[int, _Found] = {}
        #: Begin and end of what was found last, and of what was found before that.
        self._marks = cycle([(Mark(on_gpu), Mark(on_gpu)) for _ in range(3)])
        #: When the drafts were found that are there now.
        self.between = next(self._marks)

    def forget(self, rows: Sequence[int]) -> None:
        """These rows are free, or in a step again: what was found for them is of no use."""
        for row in rows:
            self._found.pop(row, None)

    def overwrite(self) -> None:
        """Other drafts are found in the place of all these."""
        self._found.clear()

    def columns(self, plan: StepPlan, unknown: Unknown) -> Ints | None:
        """[n] of each draft that a plan leaves open, its row's column; None: not all are found."""
        columns = []
        for at, count in zip(unknown.rows.tolist(), unknown.counts.tolist(), strict=True):
            found = self._found.get(int(plan.r_row[at]))
            start, output = int(plan.r_start[at]), int(plan.r_output[at])
            if found is None or not found.serves(start, output, count):
                return None
            columns.append(found.column)
        return np.repeat(columns, unknown.counts)

    def begin(self, before: Before) -> None:
        """Drafts of these rows are found from here on, each row's in a column of its own."""
        self.overwrite()
        told = (before.rows, before.counts, before.starts, before.outputs)
        for column, (row, *more) in enumerate(zip(*(each.tolist() for each in told), strict=True)):
            self._found[row] = _Found(column, *more)
        self.between = next(self._marks)
        self.between[0].record()

    def end(self) -> None:
        """They have been."""
        self.between[1].record()
