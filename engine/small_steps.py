"""Small steps of a draft model on a device, one behind the other.

A small step has one token of each row with drafts; where these are trees, all tokens of a depth
that others follow. The integers of all small steps are filled in at once; what one draws, the next
one reads from a table on the device, by the token's line of the row table. A small step is captured
for each of some sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from tokenpod.core.branches import MOST_BRANCHES
from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.draft import ChainDraft
from tokenpod.engine.graphs import Captured, Graphs, ladder
from tokenpod.engine.integers import ALIGNMENT, Counts, Integers, views
from tokenpod.engine.open_drafts import Ints
from tokenpod.engine.sampler import LeaderTokens
from tokenpod.kernels.batch import ForwardBatch
from tokenpod.kernels.triton.steps import resolve, spread
from tokenpod.scheduler.drafting import MOST_ROWS

#: The batch of a small step from its integers and tokens, all rows of which have one.
MakeBatch = Callable[[Integers, torch.Tensor], ForwardBatch]
#: The shape of a small step, and its graph if it is captured.
Shape = tuple[Counts, Captured | None]

#: Tokens of small steps of trees that are captured: up to so many.
_WIDTHS = (1, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Known:
    """[N] tokens behind which a draft model guesses, by small step."""

    #: Which small step each is in, rising, and which of its tokens.
    place: Ints
    column: Ints
    #: Its row, position and slot, the line of the row table that has the way to it, and which
    #: output of its sequence follows it.
    row: Ints
    position: Ints
    slot: Ints
    line: Ints
    output: Ints
    #: The token of the first small step's, or `plan.LAST`.
    token: Ints
    #: [N, ranks] the lines of the drafts that follow it, the likeliest first; -1: no more do.
    follows: Ints

    def of(self, which: slice) -> Known:
        """A stretch of them."""
        parts = (self.place, self.column, self.row, self.position, self.slot)
        more = (self.line, self.output, self.token, self.follows)
        return Known(*(part[which] for part in (*parts, *more)))


class SmallSteps:
    """Runs them.

    Args:
        draft: the model.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [lines, positions] int32; behind the rows' lines are padding's, then branches'.
        last_token: [rows + 1] int64: what each row sampled last.
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
        ranks: int,
    ) -> None:
        self._draft, self._sampler, self._make_batch = draft, sampler, make_batch
        self._row_table, self._last_token = row_table, last_token
        self.padding_row = len(last_token) - 1
        self._rows, self._ranks = min(self.padding_row, MOST_DRAFTS), ranks
        if ranks > 1:
            self._rows = max(self._rows, MOST_BRANCHES)
        #: What the next small step goes on from, by line.
        self._before = last_token.new_zeros(len(row_table))
        #: [most, rows * ranks] int64: the drafts that were found, by small step.
        self.found = last_token.new_zeros((draft.most, self._rows * ranks))
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
            return self._step(counts)

        for ranks in range(1, self._ranks + 1):
            sizes = ladder(most) if ranks == 1 else _WIDTHS
            counts = {size: _counts(size, ranks) for size in sizes}
            self._graphs[ranks] = Graphs(small_step, counts, self._padding, memory)
        # Also what goes before them: first launches take long.
        shape = self._shape(1, 1)
        self.run(self._padding(shape[0]).clone(), [shape], torch.zeros_like(self._last_token))

    def shapes(self, known: Known, *, trees: bool) -> list[Shape]:
        """The shape of each small step, and its graph: of trees, each has its own."""
        widths = np.bincount(known.place)
        firsts = known.place.searchsorted(np.arange(len(widths)))
        # Each rank is one draw more.
        ranks = np.maximum.reduceat((known.follows >= 0).sum(1), firsts)
        if not trees:
            widths[:] = widths[0]
        return [
            self._shape(width, each)
            for width, each in zip(widths.tolist(), ranks.tolist(), strict=True)
        ]

    def _shape(self, width: int, ranks: int) -> Shape:
        graphs = self._graphs.get(ranks)
        captured = graphs.fitting(width) if graphs else None
        return captured.counts if captured else _counts(width, ranks), captured

    def fill(self, into: torch.Tensor, known: Known, shapes: list[Shape]) -> int:
        """Write the integers of all small steps at the beginning of a tensor; how many words."""
        done, steps = 0, [counts for counts, _ in shapes]
        for counts, group in groupby(range(len(steps)), steps.__getitem__):
            numbers = [*group]
            end = done + len(numbers) * counts.words
            part = into[done:end].numpy().reshape(len(numbers), -1)
            first, last = known.place.searchsorted((numbers[0], numbers[-1] + 1)).tolist()
            self._fill_alike(views(part, counts), known.of(slice(first, last)))
            done = end
        return done

    def found_at(self, known: Known, shapes: list[Shape]) -> Ints:
        """[N, ranks] where in `found`, seen as one row, the drafts behind each token will be."""
        ranks = np.array([1 + counts.drafts // counts.rows for counts, _ in shapes])
        first = known.place * self.found.shape[1] + known.column * ranks[known.place]
        at: Ints = first[:, None] + np.arange(known.follows.shape[1])
        return at

    def run(
        self, words: torch.Tensor, shapes: list[Shape], more: torch.Tensor | None = None
    ) -> None:
        """Queue them.

        Args:
            words: their integers, pinned or on the device.
            shapes: of each.
            more: [lines] int64, by how much tokens are further on than their integers say, where
                all small steps are of one shape; None: by nothing.
        """
        self._before[: len(self._last_token)] = self._last_token
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._next.zero_()
        if more is not None:
            counts, _ = shapes[0]
            each = self._words[: len(words)].view(-1, counts.words)
            _advance(views(each, counts), more)
        for counts, captured in shapes:
            if captured is not None:
                captured.run()
            else:
                self._step(counts)

    def _step(self, counts: Counts) -> torch.Tensor:
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
        self.found[:, : found.numel()].index_copy_(0, self._next[:1], found.view(1, -1))
        self._next.add_(self._to_next(counts.words))
        return found

    def _to_next(self, words: int) -> torch.Tensor:
        """[2] int64: what `_next` grows by."""
        if words not in self._far:
            self._far[words] = torch.tensor([1, words // ALIGNMENT], device=self._next.device)
        return self._far[words]

    def _likeliest(self, logits: torch.Tensor, integers: Integers) -> torch.Tensor:
        """[n, ranks] what is drawn, what would be if that could not be, and so on."""
        n, most = len(logits), self.padding_row
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

    # -- integers ------------------------------------------------------------------------------

    def _fill_alike(self, into: Integers, some: Known) -> None:
        """Of small steps of one shape; what they lack is padding."""
        self._pad(into)
        which = some.place - some.place[0], some.column
        into.t_token[which] = some.token
        into.t_position[which] = some.position
        into.b_context[which] = some.position + 1
        into.t_slot[which] = some.slot
        into.t_row[which] = into.b_row[which] = some.line
        into.sample_row[which] = some.row
        into.sample_position[which] = some.output
        follows, rank = np.nonzero(some.follows >= 0)
        ranks = into.logit_index.shape[-1] // into.t_token.shape[-1]
        column = some.column[follows] * ranks + rank
        into.logit_index[which[0][follows], column] = some.follows[follows, rank]

    def _pad(self, into: Integers) -> None:
        for column in (into.t_token, into.t_position, into.sample_position, into.b_context):
            column[:] = 0
        into.t_slot[:] = self._draft.pool.sink
        into.t_row[:] = into.sample_row[:] = into.b_row[:] = self.padding_row
        # Of each draft, the line of its token: no logits are chosen, so this field is free.
        into.logit_index[:] = self.padding_row
        into.b_start[:] = np.arange(into.b_start.shape[-1])

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on, at the beginning of those of small steps."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        self._words[: counts.words] = torch.from_numpy(words)
        self._next.zero_()
        return self._words[: counts.words]


def _advance(integers: Integers, more: torch.Tensor) -> None:
    """Let tokens be further on, each by what its line of the row table is."""
    by = more[integers.t_row]
    integers.t_position.add_(by)
    integers.sample_position.add_(by)
    integers.b_context.add_(by)


def _counts(rows: int, ranks: int) -> Counts:
    """Of a small step of so many tokens, each followed by so many drafts."""
    return Counts(rows, rows, rows, drafts=rows * (ranks - 1))
