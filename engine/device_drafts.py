"""Finding drafts on a device: small steps of a draft model, one behind the other, without the host.

A small step has one token of each row with drafts. Which slots and positions it has is known when
the plan is, so the integers of all small steps are filled in at once; what one draws, the next one
reads from a table on the device. A small step is captured once for each of a ladder of sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import Draft
from tokenpod.engine.graphs import Graphs, decode_counts
from tokenpod.engine.integers import Counts, Integers, views
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.rounds import Unknown
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton.steps import remember, resolve
from tokenpod.scheduler.drafting import MOST_ROWS

#: The batch of a small step from its integers and tokens, all rows of which have one.
MakeBatch = Callable[[Integers, torch.Tensor], ForwardBatch]


class Proposals:
    """Finds the drafts of steps.

    Args:
        draft: the model.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [rows + 1, positions] int32; the last row is padding's.
        last_token: [rows + 1] int64: what each row sampled last.
        upload: to the device, in the order of its queue.
    """

    def __init__(
        self,
        draft: Draft,
        sampler: DeviceSampler | LeaderTokens,
        make_batch: MakeBatch,
        *,
        row_table: torch.Tensor,
        last_token: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        self._draft, self._sampler, self._make_batch = draft, sampler, make_batch
        self._row_table, self._last_token, self._upload = row_table, last_token, upload
        self._padding_row = len(last_token) - 1
        self._rows = min(self._padding_row, MOST_DRAFTS)
        #: What the next small step goes on from, by row.
        self._before = torch.zeros_like(last_token)
        self._found = last_token.new_zeros((draft.most, self._rows))
        words = Counts.decode(self._rows).words
        #: Drafts of a step, and words of all its small steps.
        self.room = min(MOST_DRAFTS, draft.most * self._rows), draft.most * words
        self._words = torch.empty(words, dtype=torch.int64, device=last_token.device)
        self._graphs: Graphs | None = None

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        counts = decode_counts(min(self._rows, MOST_ROWS))
        self._graphs = Graphs(self._small_step, counts, self._padding, memory)

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        m = len(unknown.rows)
        captured = self._graphs.fitting(m) if self._graphs else None
        counts = captured.counts if captured else Counts.decode(m)
        each = counts.words
        self._before.copy_(self._last_token)
        for place in range(unknown.most):
            # While the device takes one small step, the next one's integers are filled in.
            words = mailbox.draft_words[place * each : (place + 1) * each]
            self._fill(views(words.numpy(), counts), plan, unknown, place)
            if captured is not None:
                drafts = captured.replay(words)
            else:
                self._words[:each].copy_(words, non_blocking=True)
                drafts = self._small_step(counts, views(self._words[:each], counts))
            self._found[place, :m].copy_(drafts[:m])
        columns = np.arange(m).repeat(unknown.counts)
        numbers = np.stack([unknown.tokens, unknown.places * self._rows + columns])
        at, source = self._upload(numbers.astype(np.int64))
        found = self._found.view(-1).index_select(0, source)
        mailbox.post_drafts(found)
        return at, found

    # -- small steps ---------------------------------------------------------------------------

    def _small_step(self, counts: Counts, integers: Integers) -> torch.Tensor:
        """[n] what follows the tokens of a small step."""
        t_token = resolve(
            integers.t_token,
            integers.t_row,
            integers.t_position,
            integers.t_slot,
            self._row_table,
            self._before,
        )
        logits = self._draft.logits(self._make_batch(integers, t_token))
        drafts = self._sampler.propose(logits, integers.sample_row, integers.sample_position)
        remember(drafts, integers.sample_row, self._before)
        return drafts

    def _fill(self, into: Integers, plan: StepPlan, unknown: Unknown, place: int) -> None:
        """The integers of a small step; rows that have all their drafts are padding in it."""
        self._pad(into)
        which = np.flatnonzero(unknown.counts > place)
        rows, at = unknown.rows[which], unknown.firsts[which] + place
        # Behind the first one: what the small step before drew.
        into.t_token[which] = plan.t_token[at] if place == 0 else LAST
        into.t_position[which] = plan.r_start[rows] + place
        into.t_slot[which] = plan.t_slot[at]
        into.t_row[which] = into.sample_row[which] = into.b_row[which] = plan.r_row[rows]
        into.sample_position[which] = plan.r_output[rows] + place
        into.b_context[which] = plan.r_start[rows] + place + 1

    def _pad(self, into: Integers) -> None:
        for column in (into.t_token, into.t_position, into.sample_position, into.b_context):
            column[:] = 0
        into.t_slot[:] = self._draft.pool.sink
        into.t_row[:] = into.sample_row[:] = into.b_row[:] = self._padding_row
        into.logit_index[:] = np.arange(len(into.logit_index))
        into.b_start[:] = np.arange(len(into.b_start))

    def _padding(self, counts: Counts) -> torch.Tensor:
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        return torch.from_numpy(words).to(self._words.device)
