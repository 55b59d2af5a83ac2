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
from tokenpod.engine.draft import ChainDraft
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
        draft: ChainDraft,
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
        #: Of all small steps, and which is the next.
        self._words = last_token.new_zeros(draft.most * words)
        self._place = last_token.new_zeros(1)
        self._graphs: Graphs | None = None

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        counts = decode_counts(min(self._rows, MOST_ROWS))

        def small_step(counts: Counts, first: Integers) -> torch.Tensor:
            del first  # the device knows which small step is next
            return self._small_step(counts)

        self._graphs = Graphs(small_step, counts, self._padding, memory)

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        m, most = len(unknown.rows), unknown.most
        captured = self._graphs.fitting(m) if self._graphs else None
        counts = captured.counts if captured else Counts.decode(m)
        words = mailbox.draft_words[: most * counts.words]
        self._fill(views(words.numpy().reshape(most, -1), counts), plan, unknown)
        self._before.copy_(self._last_token)
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._place.zero_()
        for _ in range(most):
            if captured is not None:
                captured.run()
            else:
                self._small_step(counts)
        columns = np.arange(m).repeat(unknown.counts)
        numbers = np.stack([unknown.tokens, unknown.places * self._rows + columns])
        at, source = self._upload(numbers.astype(np.int64))
        found = self._found.view(-1).index_select(0, source)
        mailbox.post_drafts(found)
        return at, found

    # -- small steps ---------------------------------------------------------------------------

    def _small_step(self, counts: Counts) -> torch.Tensor:
        """Find what follows the tokens of the next small step, [n] drafts.

        The device counts which one that is: one graph does for all, and nothing is copied between
        two of them.
        """
        each = self._words[: len(self._found) * counts.words].view(-1, counts.words)
        integers = views(each.index_select(0, self._place)[0], counts)
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
        self._found[:, : len(drafts)].index_copy_(0, self._place, drafts[None])
        self._place.add_(1)
        return drafts

    def _fill(self, into: Integers, plan: StepPlan, unknown: Unknown) -> None:
        """The integers of all small steps; rows that have all their drafts are padding."""
        self._pad(into)
        column, place = np.arange(len(unknown.rows)).repeat(unknown.counts), unknown.places
        rows = unknown.rows[column]
        # Behind the first one: what the small step before drew.
        first = plan.t_token[unknown.firsts[column]]
        into.t_token[place, column] = np.where(place == 0, first, LAST)
        into.t_position[place, column] = plan.r_start[rows] + place
        into.t_slot[place, column] = plan.t_slot[unknown.firsts[column] + place]
        row = plan.r_row[rows]
        into.t_row[place, column] = into.sample_row[place, column] = row
        into.b_row[place, column] = row
        into.sample_position[place, column] = plan.r_output[rows] + place
        into.b_context[place, column] = plan.r_start[rows] + place + 1

    def _pad(self, into: Integers) -> None:
        for column in (into.t_token, into.t_position, into.sample_position, into.b_context):
            column[:] = 0
        into.t_slot[:] = self._draft.pool.sink
        into.t_row[:] = into.sample_row[:] = into.b_row[:] = self._padding_row
        into.logit_index[:] = np.arange(into.logit_index.shape[-1])
        into.b_start[:] = np.arange(into.b_start.shape[-1])

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on, at the beginning of those of small steps."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        self._words[: counts.words] = torch.from_numpy(words)
        self._place.zero_()
        return self._words[: counts.words]
