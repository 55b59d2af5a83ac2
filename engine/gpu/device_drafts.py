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
from tokenpod.engine.gpu.ahead import Ahead, Before
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.gpu.small_steps import Known, MakeBatch, SmallSteps, places_of
from tokenpod.engine.sampling.sampler import LeaderTokens
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.mailbox import Mailbox
from tokenpod.engine.steps.open_drafts import Ints, Unknown


class Proposals:
    """Finds the drafts of steps.

    Args:
        draft: a model, a head or heads.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [rows + 1, positions] int32; the last row is padding's.
        last_token: [rows + 1] int64: what each row sampled last.
        accepted: [rows + 1] int64: how many drafts of its last step were right.
        upload: to the device, in the order of its queue.
    """

    def __init__(
        self,
        draft: Drafter,
        sampler: DeviceSampler | LeaderTokens,
        make_batch: MakeBatch,
        *,
        row_table: torch.Tensor,
        last_token: torch.Tensor,
        accepted: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        self._small = SmallSteps(
            draft, sampler, make_batch, row_table=row_table, last_token=last_token
        )
        self._draft, self._accepted, self._upload = draft, accepted, upload
        self._positions = row_table.shape[1]
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
        each.
        """
        columns = self.ahead.columns(plan, unknown)
        if columns is not None:
            mailbox.drafted(self.ahead.between)
        else:
            columns = self._find(plan, mailbox, unknown)
            mailbox.drafted()
        source = unknown.places * self._small.found.shape[1] + columns
        at, found_at = self._upload(np.stack([unknown.tokens, source]).astype(np.int64))
        return at, self._small.found.view(-1).index_select(0, found_at)

    def _find(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown) -> Ints:
        """Queue them; [n] of each draft, its row's column."""
        self.ahead.overwrite()
        known = _known(plan, unknown, self._draft.each)
        shape = self._small.shape(len(unknown.rows), unknown.most)
        words = self._small.fill(mailbox.draft_words, known, shape.counts)
        self._small.run(mailbox.draft_words[:words], shape)
        return np.arange(len(unknown.rows)).repeat(unknown.counts)

    # -- the next one --------------------------------------------------------------------------

    def find_ahead(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> None:
        """Queue what the next step of the rows with drafts will need, behind this step.

        As many drafts as this step has.
        """
        self.ahead.forget(plan.r_row.tolist())
        before = Before.of(plan, unknown, self._positions)
        if before is None or len(before.rows) > self._spare_rows:
            return
        known, most = self._known_ahead(before), int(before.counts.max())
        shape = self._small.shape(len(before.rows), most)
        steps = int(known.place[-1]) + 1
        _, words = mailbox.staging.room((steps * shape.counts.words,), np.int64)
        self._small.fill(words, known, shape.counts)
        self.ahead.begin(before)
        self._small.run(words, shape, self._accepted)
        self.ahead.end()

    def _known_ahead(self, before: Before) -> Known:
        """The tokens if no draft is right: the device adds how many are."""
        place, column = places_of(before.counts, self._draft.each)
        return Known(
            place=place,
            column=column,
            row=before.rows[column],
            position=before.starts[column] + 1 + place,
            slot=self._spare + column * self._draft.most + place,
            output=before.outputs[column] + 1 + place,
            token=np.full(len(place), LAST),
        )


def _known(plan: StepPlan, unknown: Unknown, each: int) -> Known:
    """What a plan says of the tokens behind which is guessed."""
    place, column = places_of(unknown.counts, each)
    rows, at = unknown.rows[column], unknown.firsts[column] + place
    return Known(
        place=place,
        column=column,
        row=plan.r_row[rows],
        position=plan.r_start[rows] + place,
        slot=plan.t_slot[at],
        output=plan.r_output[rows] + place,
        # Behind the first one: what the small step before drew.
        token=np.where(place == 0, plan.t_token[at], LAST),
    )
