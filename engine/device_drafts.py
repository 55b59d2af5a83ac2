"""Finding drafts on a device: small steps of a draft model, one behind the other.

A small step has one token of each row with drafts; where these are trees, all tokens of a depth
that others follow. Which slots and positions it has is known when the plan is, so the integers of
all small steps are filled in at once; what one draws, the next one reads from a table on the
device, by the token's line of the row table. A small step is captured for each of some sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch

from tokenpod.core.branches import MOST_BRANCHES
from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.core.plan import LAST, StepPlan
from tokenpod.engine.branch_rows import line_of
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import ChainDraft
from tokenpod.engine.graphs import Captured, Graphs, ladder
from tokenpod.engine.integers import ALIGNMENT, Counts, Integers, views
from tokenpod.engine.mailbox import Mailbox
from tokenpod.engine.open_drafts import Asked, Ints, Unknown
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton.steps import resolve, spread
from tokenpod.scheduler.drafting import MOST_ROWS

#: The batch of a small step from its integers and tokens, all rows of which have one.
MakeBatch = Callable[[Integers, torch.Tensor], ForwardBatch]

#: Tokens of small steps of trees that are captured: up to so many.
_WIDTHS = (1, 4, 8, 16)


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
        draft: ChainDraft,
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
        #: Of all small steps, one behind the other. Which is the next, and where it begins, in
        #: units of `ALIGNMENT`.
        self._words = last_token.new_zeros(draft.most * words)
        self._next = last_token.new_zeros(2)
        #: By the words of a small step, how far the next one is.
        self._far: dict[int, torch.Tensor] = {}
        #: By how many drafts follow a token.
        self._graphs: dict[int, Graphs] = {}

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        most = min(self._rows, MOST_ROWS)

        def small_step(counts: Counts, first: Integers) -> torch.Tensor:
            del first  # the device knows which small step is next
            return self._small_step(counts)

        for ranks in range(1, self._ranks + 1):
            sizes = ladder(most) if ranks == 1 else _WIDTHS
            counts = {size: _counts(size, ranks) for size in sizes}
            self._graphs[ranks] = Graphs(small_step, counts, self._padding, memory)

    def find(
        self, plan: StepPlan, mailbox: Mailbox, unknown: Unknown
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queue the small steps.

        Returns which tokens of the step the drafts are, row after row, and the drafts: [n] int64
        each. The mailbox gets them too.
        """
        asked = unknown.asked(plan)
        steps = self._steps(asked, trees=plan.branches is not None)
        words, source = self._fill(mailbox.draft_words, plan, asked, [each for each, _ in steps])
        self._before[: len(self._last_token)] = self._last_token
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._next.zero_()
        for counts, captured in steps:
            if captured is not None:
                captured.run()
            else:
                self._small_step(counts)
        tokens = unknown.tokens
        at, found_at = self._upload(np.stack([tokens, source[tokens]]).astype(np.int64))
        found = self._found.view(-1).index_select(0, found_at)
        mailbox.post_drafts(found)
        return at, found

    def _steps(self, asked: Asked, *, trees: bool) -> list[tuple[Counts, Captured | None]]:
        """The shape of each small step, and its graph: of trees, each has its own."""
        widths = np.bincount(asked.place)
        firsts = asked.place.searchsorted(np.arange(len(widths)))
        # Each rank is one draw more.
        ranks = np.maximum.reduceat((asked.drafts >= 0).sum(1), firsts)
        if not trees:
            widths[:] = widths[0]
        found = []
        for width, each in zip(widths.tolist(), ranks, strict=True):
            graphs = self._graphs.get(each)
            captured = graphs.fitting(width) if graphs else None
            found.append((captured.counts if captured else _counts(width, each), captured))
        return found

    # -- small steps ---------------------------------------------------------------------------

    def _small_step(self, counts: Counts) -> torch.Tensor:
        """Find what follows the tokens of the next small step, [n, ranks] drafts.

        The device counts which one that is: one graph does for all of a shape, and nothing is
        copied between two of them.
        """
        windows = (len(self._words) - counts.words) // ALIGNMENT + 1
        each = self._words.as_strided((windows, counts.words), (ALIGNMENT, 1))
        integers = views(each.index_select(0, self._next[1:])[0], counts)
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
        self._found[:, : found.numel()].index_copy_(0, self._next[:1], found.view(1, -1))
        self._next.add_(self._to_next(counts.words))
        return found

    def _to_next(self, words: int) -> torch.Tensor:
        """[2] int64: what `_next` grows by."""
        if words not in self._far:
            self._far[words] = torch.tensor([1, words // ALIGNMENT], device=self._next.device)
        return self._far[words]

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

    def _fill(
        self, into: torch.Tensor, plan: StepPlan, asked: Asked, steps: list[Counts]
    ) -> tuple[torch.Tensor, Ints]:
        """Write the integers of all small steps at the beginning of a tensor.

        Returns that part of it, and [T] where in `_found` the drafts will be, of tokens that are.
        """
        lines, source, done = line_of(plan, self._padding_row + 1), np.full(plan.tokens, -1), 0
        for counts, group in groupby(range(len(steps)), steps.__getitem__):
            numbers = [*group]
            end = done + len(numbers) * counts.words
            part = into[done:end].numpy().reshape(len(numbers), -1)
            some = asked.of((asked.place >= numbers[0]) & (asked.place <= numbers[-1]))
            self._fill_alike(views(part, counts), plan, some, lines)
            which, rank = np.nonzero(some.drafts >= 0)
            ranks = 1 + counts.drafts // counts.rows
            where = some.place * self._found.shape[1] + some.column * ranks
            source[some.drafts[which, rank]] = where[which] + rank
            done = end
        return into[:done], source

    def _fill_alike(self, into: Integers, plan: StepPlan, some: Asked, lines: Ints) -> None:
        """Of small steps of one shape; what they lack is padding."""
        self._pad(into)
        which = some.place - some.place[0], some.column
        row, start = plan.r_row[some.rows], plan.r_start[some.rows] + some.place
        # Behind the first one: what the small step before drew.
        into.t_token[which] = np.where(some.place == 0, plan.t_token[some.at], LAST)
        into.t_position[which] = start
        into.b_context[which] = start + 1
        into.t_slot[which] = plan.t_slot[some.at]
        into.t_row[which] = into.b_row[which] = lines[some.at]
        into.sample_row[which] = row
        into.sample_position[which] = plan.r_output[some.rows] + some.place
        follows, rank = np.nonzero(some.drafts >= 0)
        ranks = into.logit_index.shape[-1] // into.t_token.shape[-1]
        column = some.column[follows] * ranks + rank
        into.logit_index[which[0][follows], column] = lines[some.drafts[follows, rank]]

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
        self._next.zero_()
        return self._words[: counts.words]


def _counts(rows: int, ranks: int) -> Counts:
    """Of a small step of so many tokens, each followed by so many drafts."""
    return Counts(rows, rows, rows, drafts=rows * (ranks - 1))
