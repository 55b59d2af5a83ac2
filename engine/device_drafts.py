"""Finding drafts on a device: small steps of a draft model (`small_steps`).

Between two steps of a row the device would wait for the host, which has to see what was drawn, plan
and launch. But what the next small steps need is on the device: the last token, and how many drafts
were right. So the small steps of the next step are queued behind each one, before the host has seen
anything of it, and compute meanwhile.

    device   check n | draw | follow | small steps of n + 1 | check n + 1
    host                    settle n, plan and launch n + 1

They write keys and values to slots of the draft model's pool that belong to nobody, and enter these
in the row table, where the next step overwrites them: that step's own slots are not known yet. What
was found is used if the rows go on, with as many drafts or fewer; else it was in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.branch_rows import line_of
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import ChainDraft
from tokenpod.engine.mailbox import Mailbox, Mark
from tokenpod.engine.open_drafts import Asked, Ints, Unknown
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.engine.small_steps import Known, MakeBatch, SmallSteps

#: Rows for which drafts are found before their step is planned: so many at most.
MOST_AHEAD = 16


def spare_slots(most: int, rows: int) -> int:
    """Slots that a draft model's pool is to have more than the served one's.

    `most`: drafts of one row in a step; `rows`: sequences that can be live at once.
    """
    return 1 + most * min(rows, MOST_AHEAD)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Drafts of a row that were found before its step was planned."""

    column: int
    #: How many, and of the step behind which they were found: position and output number.
    count: int
    start: int
    output: int

    def serves(self, start: int, output: int, count: int) -> bool:
        """Whether the row's next step begins with them."""
        further = start - self.start
        return 0 < further <= self.count + 1 and further == output - self.output <= self.most(count)

    def most(self, count: int) -> int:
        """How much further the next step may be that has so many drafts; 0: it has too many."""
        return self.count + 1 if count <= self.count else 0


class Proposals:
    """Finds the drafts of steps.

    Args:
        draft: the model.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [lines, positions] int32; behind the rows' lines are padding's, then branches'.
        last_token: [rows + 1] int64: what each row sampled last.
        accepted: [rows + 1] int64: how many drafts of its last step were right.
        upload: to the device, in the order of its queue.
        ranks: most drafts that follow one token.
    """

    def __init__(
        self,
        draft: ChainDraft,
        sampler: DeviceSampler | LeaderTokens,
        make_batch: MakeBatch,
        *,
        row_table: torch.Tensor,
        last_token: torch.Tensor,
        accepted: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
        ranks: int = 1,
    ) -> None:
        self._small = SmallSteps(
            draft, sampler, make_batch, row_table=row_table, last_token=last_token, ranks=ranks
        )
        self._draft, self._accepted, self._upload = draft, accepted, upload
        self._positions, self._padding_row = row_table.shape[1], len(last_token) - 1
        #: Drafts of a step, and words of the integers of its small steps.
        self.room = self._small.room
        #: The first slot that belongs to nobody, and for how many rows there are some.
        self._spare = self._spare_rows = 0
        #: By row.
        self._ahead: dict[int, _Ahead] = {}
        on_gpu = last_token.is_cuda
        #: Begin and end of small steps: of those that have been queued last, and of those before.
        self._marks = cycle([(Mark(on_gpu), Mark(on_gpu)) for _ in range(3)])
        self._found_between = next(self._marks)

    def use(self, slots: int) -> None:
        """The served model's pool has so many slots, the draft model's perhaps more."""
        self._spare = slots + 1  # behind the slot that padding writes to
        self._spare_rows = max(self._draft.pool.slots - self._spare, 0) // self._draft.most

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        self._small.capture(memory)

    def forget(self, rows: Sequence[int]) -> None:
        """These rows are free: what was found for them is of no use."""
        for row in rows:
            self._ahead.pop(row, None)

    # -- this step -----------------------------------------------------------------------------

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps, if they have not been before.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        source = self._found_before(plan, unknown)
        if source is not None:
            mailbox.drafted(self._found_between)
        else:
            source = self._find(plan, mailbox, unknown)
            mailbox.drafted()
        at, found_at = self._upload(np.stack([unknown.tokens, source]).astype(np.int64))
        found = self._small.found.view(-1).index_select(0, found_at)
        mailbox.post_drafts(found)
        return at, found

    def _find(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown) -> Ints:
        """Queue them; [n] where the drafts will be."""
        asked = unknown.asked(plan)
        known = _known(plan, asked, self._padding_row + 1)
        shapes = self._small.shapes(known, trees=plan.branches is not None)
        words = self._small.fill(mailbox.draft_words, known, shapes)
        self._small.run(mailbox.draft_words[:words], shapes)
        there, source = asked.drafts >= 0, np.full(plan.tokens, -1)
        source[asked.drafts[there]] = self._small.found_at(known, shapes)[there]
        found: Ints = source[unknown.tokens]
        return found

    def _found_before(self, plan: StepPlan, unknown: Unknown) -> Ints | None:
        """[n] where the drafts are; None: not all are."""
        if plan.branches is not None:
            return None
        columns = []
        for at, count in zip(unknown.rows.tolist(), unknown.counts.tolist(), strict=True):
            ahead = self._ahead.get(int(plan.r_row[at]))
            start, output = int(plan.r_start[at]), int(plan.r_output[at])
            if ahead is None or not ahead.serves(start, output, count):
                return None
            columns.append(ahead.column)
        width = self._small.found.shape[1]
        found: Ints = unknown.places * width + np.repeat(columns, unknown.counts)
        return found

    # -- the next one --------------------------------------------------------------------------

    def find_ahead(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> None:
        """Queue what the next step of the rows with drafts will need, behind this step.

        As many drafts as this step has. Nothing is found for rows of trees, nor where some row
        waits for its mask: it has not been drawn yet.
        """
        self.forget(plan.r_row.tolist())
        if unknown is None or plan.branches is not None or len(plan.r_masked):
            return
        counts = unknown.counts
        # The furthest that a small step may be: all drafts are right, and as many follow.
        fits = plan.r_start[unknown.rows] + 2 * counts < self._positions
        rows, counts = unknown.rows[fits], counts[fits]
        if not 0 < len(rows) <= self._spare_rows:
            return
        starts, outputs, which = plan.r_start[rows], plan.r_output[rows], plan.r_row[rows]
        known = self._known_ahead(which, starts, outputs, counts)
        shapes = self._small.shapes(known, trees=False)
        _, words = mailbox.staging.room((sum(each.words for each, _ in shapes),), np.int64)
        self._small.fill(words, known, shapes)
        began, ended = self._found_between = next(self._marks)
        began.record()
        self._small.run(words, shapes, self._accepted)
        ended.record()
        told = (each.tolist() for each in (which, counts, starts, outputs))
        for column, (row, count, start, output) in enumerate(zip(*told, strict=True)):
            self._ahead[row] = _Ahead(column, count, start, output)

    def _known_ahead(self, rows: Ints, starts: Ints, outputs: Ints, counts: Ints) -> Known:
        """If no draft is right, which the device adds: each row's tokens in a column of their own.

        Args:
            rows: [m] of the sampler and the row table.
            starts, outputs, counts: [m] of the step before: positions, output numbers, drafts.
        """
        place = np.arange(int(counts.max())).repeat(len(rows))
        column = np.tile(np.arange(len(rows)), int(counts.max()))
        some = place < counts[column]
        place, column = place[some], column[some]
        return Known(
            place=place,
            column=column,
            row=rows[column],
            position=starts[column] + 1 + place,
            slot=self._spare + column * self._draft.most + place,
            line=rows[column],
            output=outputs[column] + 1 + place,
            token=np.full(len(place), LAST),
            follows=rows[column][:, None],
        )


def _known(plan: StepPlan, asked: Asked, first_line: int) -> Known:
    """What a plan says of the tokens behind which is guessed.

    `first_line`: the line of the row table for the step's first branch.
    """
    lines = line_of(plan, first_line)
    return Known(
        place=asked.place,
        column=asked.column,
        row=plan.r_row[asked.rows],
        position=plan.r_start[asked.rows] + asked.place,
        slot=plan.t_slot[asked.at],
        line=lines[asked.at],
        output=plan.r_output[asked.rows] + asked.place,
        # Behind the first one: what the small step before drew.
        token=np.where(asked.place == 0, plan.t_token[asked.at], LAST),
        follows=np.where(asked.drafts >= 0, lines[asked.drafts], -1),
    )
