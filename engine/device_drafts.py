"""Finding drafts on a device: small steps of a draft model, one behind the other.

A small step has one token of each row with drafts; where these are trees, all tokens of a depth
that others follow. Which slots and positions it has is known when the plan is, so the integers of
all small steps are filled in at once; what one draws, the next one reads from a table on the
device, by the token's line of the row table. A small step is captured for each of some sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tokenpod.core.branches import MOST_BRANCHES
from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.branch_rows import line_of
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import Draft
from tokenpod.engine.graphs import Graphs, ladder
from tokenpod.engine.integers import Counts, Integers, views
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.rounds import Ints, Level, Unknown
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton.steps import resolve, spread
from tokenpod.scheduler.drafting import MOST_ROWS

#: The batch of a small step from its integers and tokens, all rows of which have one.
MakeBatch = Callable[[Integers, torch.Tensor], ForwardBatch]

#: Tokens of small steps of trees that are captured: up to so many.
_WIDTHS = (4, 8, 16)


class Proposals:
    """Finds the drafts of steps.

    Args:
        draft: the model.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [lines, positions] int32; behind the rows' lines are padding's, then branches'.
        last_token: [rows + 1] int64: what each row sampled last.
        upload: to the device, in the order of its queue.
        ranks: most drafts that follow one token.
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
        ranks: int = 1,
    ) -> None:
        self._draft, self._sampler, self._make_batch = draft, sampler, make_batch
        self._row_table, self._last_token, self._upload = row_table, last_token, upload
        self._padding_row = len(last_token) - 1
        self._rows, self._ranks = min(self._padding_row, MOST_DRAFTS), ranks
        if ranks > 1:
            self._rows = max(self._rows, MOST_BRANCHES)
        #: What the next small step goes on from, by line.
        self._before = last_token.new_zeros(len(row_table))
        self._found = last_token.new_zeros((draft.most, self._rows * ranks))
        words = _counts(self._rows, ranks).words
        #: Drafts of a step, and words of all its small steps.
        self.room = min(MOST_DRAFTS, draft.most * self._rows), draft.most * words
        #: Of all small steps, and which is the next.
        self._words = last_token.new_zeros(draft.most * words)
        self._place = last_token.new_zeros(1)
        #: By how many drafts follow a token.
        self._graphs: dict[int, Graphs] = {}

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        most = min(self._rows, MOST_ROWS)
        chains = {size: _counts(size, 1) for size in ladder(most)}
        self._graphs[1] = Graphs(self._small_step, chains, self._padding, memory)
        if self._ranks > 1:
            trees = {size: _counts(size, self._ranks) for size in _WIDTHS}
            self._graphs[self._ranks] = Graphs(self._small_step, trees, self._padding, memory)

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        levels = unknown.levels
        m = max(len(level.at) for level in levels)
        ranks = 1 if plan.branches is None else self._ranks
        graphs = self._graphs.get(ranks)
        captured = graphs.fitting(m) if graphs else None
        counts = captured.counts if captured else _counts(m, ranks)
        words = mailbox.draft_words[: len(levels) * counts.words]
        into = views(words.numpy().reshape(len(levels), -1), counts)
        source = self._fill(into, plan, levels)
        self._before[: len(self._last_token)] = self._last_token
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._place.zero_()
        for _ in levels:
            if captured is not None:
                captured.run()
            else:
                self._small_step(counts)
        tokens = unknown.tokens
        at, found_at = self._upload(np.stack([tokens, source[tokens]]).astype(np.int64))
        found = self._found.view(-1).index_select(0, found_at)
        mailbox.post_drafts(found)
        return at, found

    # -- small steps ---------------------------------------------------------------------------

    def _small_step(self, counts: Counts, first: Integers | None = None) -> torch.Tensor:
        """Find what follows the tokens of the next small step, [n] drafts.

        The device counts which one that is: one graph does for all, and nothing is copied between
        two of them. `first`: what a graph of its own integers would read.
        """
        del first
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
        found = self._likeliest(logits, integers)
        spread(found, integers.logit_index, self._before, logits.shape[1])
        self._found[:, : found.numel()].index_copy_(0, self._place, found.view(1, -1))
        self._place.add_(1)
        return found

    def _likeliest(self, logits: torch.Tensor, integers: Integers) -> torch.Tensor:
        """[n, ranks] what is drawn, what would be if that could not be, and so on."""
        n, most = len(logits), self._padding_row
        ranks = len(integers.logit_index) // n
        rows, positions = integers.sample_row, integers.sample_position
        if ranks == 1 and n <= most:
            likeliest: torch.Tensor = self._sampler.propose(logits, rows, positions)
            return likeliest[:, None]
        found: torch.Tensor = rows.new_empty((n, ranks))
        for rank in range(ranks):
            # A sampler has room for as many at a time as there are rows.
            for part in (slice(at, at + most) for at in range(0, n, most)):
                drafts = self._sampler.propose(logits[part], rows[part], positions[part])
                found[part, rank] = drafts
            if rank + 1 < ranks:
                logits.scatter_(1, found[:, rank : rank + 1], -torch.inf)
        return found

    def _fill(self, into: Integers, plan: StepPlan, levels: list[Level]) -> Ints:
        """The integers of all small steps, whose rows beyond what they have are padding.

        Returns [T] where in `_found` the drafts will be, of tokens that are drafts.
        """
        self._pad(into)
        ranks = into.logit_index.shape[-1] // into.t_token.shape[-1]
        lines, source = line_of(plan, self._padding_row + 1), np.full(plan.tokens, -1)
        for number, level in enumerate(levels):
            n = len(level.at)
            # Behind the first one: what the small step before drew.
            into.t_token[number, :n] = plan.t_token[level.at] if number == 0 else LAST
            starts = plan.r_start[level.rows] + level.place
            into.t_position[number, :n] = starts
            into.b_context[number, :n] = starts + 1
            into.t_slot[number, :n] = plan.t_slot[level.at]
            into.t_row[number, :n] = into.b_row[number, :n] = lines[level.at]
            into.sample_row[number, :n] = plan.r_row[level.rows]
            into.sample_position[number, :n] = plan.r_output[level.rows] + level.place
            which, rank = np.nonzero(level.drafts >= 0)
            drafts = level.drafts[which, rank]
            into.logit_index[number, which * ranks + rank] = lines[drafts]
            source[drafts] = number * self._found.shape[1] + which * ranks + rank
        return source

    def _pad(self, into: Integers) -> None:
        for column in (into.t_token, into.t_position, into.sample_position, into.b_context):
            column[:] = 0
        into.t_slot[:] = self._draft.pool.sink
        into.t_row[:] = into.sample_row[:] = into.b_row[:] = self._padding_row
        # Of each draft, the line of its token: no logits are chosen, so this field is free.
        into.logit_index[:] = self._padding_row
        into.b_start[:] = np.arange(into.b_start.shape[-1])

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on, at the beginning of those of small steps."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        self._words[: counts.words] = torch.from_numpy(words)
        self._place.zero_()
        return self._words[: counts.words]


def _counts(rows: int, ranks: int) -> Counts:
    """Of a small step of so many tokens, each followed by so many drafts."""
    return Counts(rows, rows, rows, drafts=rows * (ranks - 1))
