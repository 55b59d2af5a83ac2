"""Finding drafts on a device: small steps of a draft model (`small_steps`).

Where they run before their step is planned (`ahead`), they write keys and values to slots of the
draft model's pool that belong to nobody, and enter these in the row table, where the next step
overwrites them: that step's own slots are not known yet.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.ahead import Ahead, Before
from tokenpod.engine.branch_rows import line_of
from tokenpod.engine.device_parallel import ParallelProposals
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import ChainDraft, Draft
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.open_drafts import Asked, Ints, Unknown
from tokenpod.engine.parallel_draft import ParallelDraft
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.engine.small_steps import Known, MakeBatch, SmallSteps


def make_proposals(
    draft: Draft,
    sampler: DeviceSampler | LeaderTokens,
    make_batch: MakeBatch,
    *,
    row_table: torch.Tensor,
    last_token: torch.Tensor,
    accepted: torch.Tensor,
    upload: Callable[[np.ndarray], torch.Tensor],
    ranks: int,
) -> Proposals | ParallelProposals:
    """What finds drafts with a draft model, a head, or heads; see `Proposals`."""
    if isinstance(draft, ParallelDraft):
        return ParallelProposals(draft, sampler, last_token=last_token, upload=upload)
    tables = {"row_table": row_table, "last_token": last_token, "accepted": accepted}
    return Proposals(draft, sampler, make_batch, **tables, upload=upload, ranks=ranks)


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
        self.ahead = Ahead(on_gpu=last_token.is_cuda)

    def use(self, slots: int) -> None:
        """The served model's pool has so many slots, the draft model's perhaps more."""
        self._spare = slots + 1  # behind the slot that padding writes to
        self._spare_rows = max(self._draft.pool.slots - self._spare, 0) // self._draft.most

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        self._small.capture(memory)

    # -- this step -----------------------------------------------------------------------------

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps, if they have not been before.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        columns = self.ahead.columns(plan, unknown)
        if columns is not None:
            source: Ints = unknown.places * self._small.found.shape[1] + columns
            mailbox.drafted(self.ahead.between)
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

    # -- the next one --------------------------------------------------------------------------

    def find_ahead(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> None:
        """Queue what the next step of the rows with drafts will need, behind this step.

        As many drafts as this step has.
        """
        self.ahead.forget(plan.r_row.tolist())
        before = Before.of(plan, unknown, self._positions)
        if before is None or len(before.rows) > self._spare_rows:
            return
        known = self._known_ahead(before)
        shapes = self._small.shapes(known, trees=False)
        _, words = mailbox.staging.room((sum(each.words for each, _ in shapes),), np.int64)
        self._small.fill(words, known, shapes)
        self.ahead.begin(before)
        self._small.run(words, shapes, self._accepted)
        self.ahead.end()

    def _known_ahead(self, before: Before) -> Known:
        """The tokens if no draft is right: the device adds how many are."""
        most, m = int(before.counts.max()), len(before.rows)
        place, column = np.arange(most).repeat(m), np.tile(np.arange(m), most)
        some = place < before.counts[column]
        place, column = place[some], column[some]
        rows = before.rows[column]
        return Known(
            place=place,
            column=column,
            row=rows,
            position=before.starts[column] + 1 + place,
            slot=self._spare + column * self._draft.most + place,
            line=rows,
            output=before.outputs[column] + 1 + place,
            token=np.full(len(place), LAST),
            follows=rows[:, None],
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
