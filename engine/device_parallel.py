"""Finding drafts on a device with heads that guess all of them at once: one launch for a step.

It is captured for each of a ladder of rows, and for a few numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.plan import StepPlan
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.graphs import Graphs, decode_counts
from tokenpod.engine.integers import Counts, Integers, views
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.open_drafts import Unknown
from tokenpod.engine.parallel_draft import ParallelDraft
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.scheduler.drafting import MOST_ROWS


class ParallelProposals:
    """Finds the drafts of steps; see `device_drafts.Proposals`.

    Args:
        draft: the heads.
        sampler: of all rows.
        last_token: [rows + 1] int64: what each row sampled last.
        upload: to the device, in the order of its queue.
    """

    def __init__(
        self,
        draft: ParallelDraft,
        sampler: DeviceSampler | LeaderTokens,
        *,
        last_token: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        self._draft, self._sampler, self._upload = draft, sampler, upload
        self._padding_row = len(last_token) - 1
        #: That the sampler draws for at once.
        self._drawn = self._padding_row
        self._rows = min(self._padding_row, MOST_DRAFTS)
        self._found = last_token.new_zeros((draft.most, self._rows))
        words = Counts.decode(self._rows).words
        self._words = last_token.new_zeros(words)
        #: Drafts of a step, and words of its integers.
        self.room = min(MOST_DRAFTS, draft.most * self._rows), words
        #: By drafts of a row.
        self._graphs: dict[int, Graphs] = {}

    def capture(self, memory: object) -> None:
        """Capture the launch; `memory` is that of graphs captured before."""
        counts = decode_counts(min(self._rows, MOST_ROWS))
        most = self._draft.most
        for heads in sorted({1, 2, 3, *range(4, most, 2), most}):
            if heads <= most:
                guess = partial(self._guess, heads)
                self._graphs[heads] = Graphs(guess, counts, self._padding, memory)

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the launch; see `Proposals.find`."""
        m, most = len(unknown.rows), int(unknown.counts.max())
        heads = next((each for each in self._graphs if each >= most), most)
        graphs = self._graphs.get(heads)
        captured = graphs.fitting(m) if graphs else None
        counts = captured.counts if captured else Counts.decode(m)
        words = mailbox.draft_words[: counts.words]
        self._fill(views(words.numpy(), counts), plan, unknown)
        if captured is not None:
            captured.replay(words)
        else:
            own = self._words[: counts.words]
            own.copy_(words, non_blocking=True)
            self._guess(heads, counts, views(own, counts))
        columns, tokens = np.arange(m).repeat(unknown.counts), unknown.tokens
        places = tokens - unknown.firsts.repeat(unknown.counts) - 1
        numbers = np.stack([tokens, places * self._rows + columns])
        at, source = self._upload(numbers.astype(np.int64))
        found = self._found.view(-1).index_select(0, source)
        mailbox.post_drafts(found)
        mailbox.drafted()
        return at, found

    def _guess(self, heads: int, counts: Counts, integers: Integers) -> torch.Tensor:
        """[heads, rows] drafts of each row, which the sampler draws a few heads at a time."""
        n, rows = counts.rows, integers.sample_row
        logits = self._draft.logits(rows, integers.t_position, heads)
        each = max(self._drawn // n, 1)
        for first in range(0, heads, each):
            end = min(first + each, heads)
            places = torch.arange(first, end, device=rows.device)
            positions = (integers.sample_position + places[:, None]).flatten()
            drawn = self._sampler.propose(
                logits[first * n : end * n], rows.repeat(end - first), positions
            )
            self._found[first:end, :n].copy_(drawn.view(end - first, n))
        return self._found[:heads, :n]

    def _fill(self, into: Integers, plan: StepPlan, unknown: Unknown) -> None:
        """Which rows, the positions of the hidden states that heads read, and whose noise."""
        self._pad(into)
        n, rows = len(unknown.rows), unknown.rows
        into.sample_row[:n] = plan.r_row[rows]
        into.t_position[:n] = plan.r_start[rows] - 1
        into.sample_position[:n] = plan.r_output[rows]

    def _pad(self, into: Integers) -> None:
        into.t_position[:] = into.sample_position[:] = 0
        into.sample_row[:] = self._padding_row

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        return torch.from_numpy(words).to(self._words.device)
