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
from tokenpod.engine.ahead import MOST_AHEAD, Ahead, Before
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.graphs import Graphs, decode_counts
from tokenpod.engine.integers import Counts, Integers, views
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.open_drafts import Ints, Unknown
from tokenpod.engine.parallel_draft import ParallelDraft
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.scheduler.drafting import MOST_ROWS


class ParallelProposals:
    """Finds the drafts of steps; see `device_drafts.Proposals`.

    Args:
        draft: the heads.
        sampler: of all rows.
        accepted: [rows + 1] int64: how many drafts of each row's last step were right.
        upload: to the device, in the order of its queue.
    """

    def __init__(
        self,
        draft: ParallelDraft,
        sampler: DeviceSampler | LeaderTokens,
        *,
        accepted: torch.Tensor,
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> None:
        self._draft, self._sampler, self._upload = draft, sampler, upload
        self._accepted, self._padding_row = accepted, len(accepted) - 1
        self.ahead = Ahead(on_gpu=accepted.is_cuda)
        #: That the sampler draws for at once.
        self._drawn = self._padding_row
        self._rows = min(self._padding_row, MOST_DRAFTS)
        self._found = accepted.new_zeros((draft.most, self._rows))
        words = Counts.decode(self._rows).words
        self._words = accepted.new_zeros(words)
        #: Drafts of a step, and words of its integers.
        self.room = min(MOST_DRAFTS, draft.most * self._rows), words
        #: By drafts of a row.
        self._graphs: dict[int, Graphs] = {}

    def use(self, slots: int) -> None:
        """See `Proposals.use`: heads keep nothing at slots."""

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
        """Queue the launch, if it has not been before; see `Proposals.find`."""
        columns, tokens = self.ahead.columns(plan, unknown), unknown.tokens
        if columns is not None:
            mailbox.drafted(self.ahead.between)
        else:
            at = unknown.rows
            known = plan.r_row[at], plan.r_start[at] - 1, plan.r_output[at]
            self._run(mailbox.draft_words, unknown.most, known)
            columns = np.arange(len(at)).repeat(unknown.counts)
            mailbox.drafted()
        numbers = np.stack([tokens, unknown.places * self._rows + columns])
        at, source = self._upload(numbers.astype(np.int64))
        found = self._found.view(-1).index_select(0, source)
        mailbox.post_drafts(found)
        return at, found

    def find_ahead(self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown | None) -> None:
        """Queue it for the next step, behind this one: see `Proposals.find_ahead`."""
        self.ahead.forget(plan.r_row.tolist())
        before = Before.of(plan, unknown, 1 << 31)  # nothing is written by position
        if before is None or len(before.rows) > MOST_AHEAD:
            return
        _, words = mailbox.staging.room((self._words.numel(),), np.int64)
        self.ahead.begin(before)
        known = before.rows, before.starts, before.outputs + 1
        self._run(words, int(before.counts.max()), known, further=True)
        self.ahead.end()

    def _run(
        self,
        words: torch.Tensor,
        most: int,
        known: tuple[Ints, Ints, Ints],
        *,
        further: bool = False,
    ) -> None:
        """Find up to `most` drafts of each of m rows.

        Args:
            words: room for their integers, on their way to the device.
            most: drafts.
            known: [m] rows, positions of the hidden states that heads read, and whose noise.
            further: whether rows are further on, by as many tokens as drafts were right.
        """
        m = len(known[0])
        heads = next((each for each in self._graphs if each >= most), most)
        graphs = self._graphs.get(heads)
        captured = graphs.fitting(m) if graphs else None
        counts = captured.counts if captured else Counts.decode(m)
        words = words[: counts.words]
        into = views(words.numpy(), counts)
        self._pad(into)
        into.sample_row[:m], into.t_position[:m], into.sample_position[:m] = known
        go_on = self._go_on if further else None
        if captured is not None:
            captured.replay(words, go_on)
            return
        own = self._words[: counts.words]
        own.copy_(words, non_blocking=True)
        integers = views(own, counts)
        if go_on is not None:
            go_on(integers)
        self._guess(heads, counts, integers)

    def _go_on(self, integers: Integers) -> None:
        by = self._accepted[integers.sample_row]
        integers.t_position.add_(by)
        integers.sample_position.add_(by)

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

    def _pad(self, into: Integers) -> None:
        into.t_position[:] = into.sample_position[:] = 0
        into.sample_row[:] = self._padding_row

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        return torch.from_numpy(words).to(self._words.device)
