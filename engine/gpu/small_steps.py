"""Small steps of a draft model on a device, one behind the other.

A small step has one token of each row that has as many drafts, and finds one draft behind it, or
with heads that guess at once, several. The integers of all small steps are filled in at once; what
one draws, the next one reads from a table on the device, by the token's row. A small step is
captured for each of some sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tokenpod.core.capacity import MOST_DRAFTS
from tokenpod.engine.gpu.device_sampler import DeviceSampler
from tokenpod.engine.gpu.graphs import Captured, Graphs, decode_counts
from tokenpod.engine.sampling.sampler import LeaderTokens
from tokenpod.engine.steps.drafter import Drafter
from tokenpod.engine.steps.integers import ALIGNMENT, Counts, Integers, views
from tokenpod.engine.steps.open_drafts import Ints
from tokenpod.kernels.gpu.steps import remember, resolve
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.scheduler.drafts.drafting import MOST_ROWS

#: The batch of a small step from its integers and tokens, all rows of which have one.
MakeBatch = Callable[[Integers, torch.Tensor], ForwardBatch]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a small step: its integers, drafts behind each token, and its graph, if there is one."""

    counts: Counts
    drafts: int
    captured: Captured | None


@dataclass(frozen=True, slots=True)
class Known:
    """[N] tokens behind which a draft model guesses, by small step."""

    #: Which small step each is in, rising, and which of its tokens.
    place: Ints
    column: Ints
    #: Its row, position and slot, and which output of its sequence follows it.
    row: Ints
    position: Ints
    slot: Ints
    output: Ints
    #: The token of the first small step's, or `plan.LAST`.
    token: Ints


def places_of(counts: Ints, each: int) -> tuple[Ints, Ints]:
    """[N] each: which small step, rising, and which column, where m rows have so many drafts.

    `each`: drafts that one small step finds behind a token.
    """
    steps = -(-counts // each)
    most, m = int(steps.max()), len(counts)
    place, column = np.arange(most).repeat(m), np.tile(np.arange(m), most)
    some = place < steps[column]
    return place[some], column[some]


class SmallSteps:
    """Runs them.

    Args:
        draft: a model, a head or heads.
        sampler: of all rows.
        make_batch: of a small step.
        row_table: [rows + 1, positions] int32; the last row is padding's.
        last_token: [rows + 1] int64: what each row sampled last.
    """

    def __init__(
        self,
        draft: Drafter,
        sampler: DeviceSampler | LeaderTokens,
        make_batch: MakeBatch,
        *,
        row_table: torch.Tensor,
        last_token: torch.Tensor,
    ) -> None:
        self._draft, self._sampler, self._make_batch = draft, sampler, make_batch
        self._row_table, self._last_token = row_table, last_token
        self.padding_row = len(last_token) - 1
        self._rows = min(self.padding_row, MOST_DRAFTS)
        #: What the next small step goes on from, by row.
        self._before = torch.zeros_like(last_token)
        #: [most, rows] int64: the drafts that were found, by place in their row, and column.
        self.found = last_token.new_zeros((draft.most, self._rows))
        words = Counts.decode(self._rows).words
        #: Drafts of a step, and words of all its small steps.
        self.room = min(MOST_DRAFTS, draft.most * self._rows), draft.most * words
        #: Of all small steps, one behind the other. Which is the next, and where it begins, in
        #: units of `ALIGNMENT`.
        self._words = last_token.new_zeros(draft.most * words)
        self._next = last_token.new_zeros(2)
        #: By the words of a small step, how far the next one is.
        self._far: dict[int, torch.Tensor] = {}
        #: By drafts behind each token.
        self._graphs: dict[int, Graphs] = {}

    def capture(self, memory: object) -> None:
        """Capture small steps; `memory` is that of graphs captured before."""
        most = min(self._rows, MOST_ROWS)

        def small_step(drafts: int, counts: Counts, first: Integers) -> torch.Tensor:
            del first  # the device knows which small step is next
            return self._step(counts, drafts)

        each = self._draft.each
        for drafts in sorted({n for n in (1, 2, 3, *range(4, each, 2), each) if n <= each}):
            step = partial(small_step, drafts)
            self._graphs[drafts] = Graphs(step, decode_counts(most), self._padding, memory)
        # Also what goes before them: first launches take long.
        shape = self.shape(1, 1)
        self.run(self._padding(shape.counts).clone(), shape, torch.zeros_like(self._last_token))

    def shape(self, rows: int, drafts: int) -> Shape:
        """The shape of small steps of so many rows, where one of them has so many drafts."""
        drafts = min(drafts, self._draft.each)
        known = next((n for n in self._graphs if n >= drafts), drafts)
        captured = self._graphs[known].fitting(rows) if self._graphs else None
        if captured is None:
            return Shape(Counts.decode(rows), drafts, None)
        return Shape(captured.counts, known, captured)

    def fill(self, into: torch.Tensor, known: Known, counts: Counts) -> int:
        """Write the integers of all small steps at the beginning of a tensor; how many words."""
        steps = int(known.place[-1]) + 1
        words = into[: steps * counts.words]
        self._fill(views(words.numpy().reshape(steps, -1), counts), known)
        return len(words)

    def run(self, words: torch.Tensor, shape: Shape, more: torch.Tensor | None = None) -> None:
        """Queue them.

        Args:
            words: their integers, pinned or on the device.
            shape: of each.
            more: [rows + 1] int64, by how much each row's tokens are further on than their integers
                say; None: by nothing.
        """
        counts = shape.counts
        self._before.copy_(self._last_token)
        self._words[: len(words)].copy_(words, non_blocking=True)
        self._next.zero_()
        each = self._words[: len(words)].view(-1, counts.words)
        if more is not None:
            _advance(views(each, counts), more)
        for _ in each:
            if shape.captured is not None:
                shape.captured.run()
            else:
                self._step(counts, shape.drafts)

    def _step(self, counts: Counts, drafts: int) -> torch.Tensor:
        """Find what follows the tokens of the next small step, [drafts, n].

        The device counts which one that is: one graph does for all of a shape, and nothing is
        copied between two of them.
        """
        windows = (len(self._words) - counts.words) // ALIGNMENT + 1
        each = self._words.as_strided((windows, counts.words), (ALIGNMENT, 1))
        integers = views(each.index_select(0, self._next[1:])[0], counts)
        t_token, _ = resolve(
            integers.t_token,
            integers.t_row,
            integers.t_place,
            integers.t_slot,
            self._row_table,
            self._before,
        )
        logits = self._draft.logits(self._make_batch(integers, t_token), drafts)
        rows, positions = integers.sample_row, integers.sample_position
        if drafts > 1:  # there is no further small step
            return self._propose_each(logits, rows, positions, drafts)
        found = self._sampler.propose(logits, rows, positions)[None]
        remember(found[0], rows, self._before)
        self.found[:, : found.shape[1]].index_copy_(0, self._next[:1], found)
        self._next.add_(self._to_next(counts.words))
        return found

    def _propose_each(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, drafts: int
    ) -> torch.Tensor:
        """[drafts, n] of each row, drawn as many at a time as the sampler has room for."""
        n = len(rows)
        each = max(self.padding_row // n, 1)
        for first in range(0, drafts, each):
            end = min(first + each, drafts)
            places = torch.arange(first, end, device=rows.device)
            drawn = self._sampler.propose(
                logits[first * n : end * n],
                rows.repeat(end - first),
                (positions + places[:, None]).flatten(),
            )
            self.found[first:end, :n].copy_(drawn.view(end - first, n))
        return self.found[:drafts, :n]

    def _to_next(self, words: int) -> torch.Tensor:
        """[2] int64: what `_next` grows by."""
        if words not in self._far:
            self._far[words] = torch.tensor([1, words // ALIGNMENT], device=self._next.device)
        return self._far[words]

    # -- integers ------------------------------------------------------------------------------

    def _fill(self, into: Integers, known: Known) -> None:
        """What small steps lack is padding."""
        self._pad(into)
        which = known.place, known.column
        into.t_token[which] = known.token
        into.t_place[which] = known.position
        into.b_context[which] = known.position + 1
        into.t_slot[which] = known.slot
        into.t_row[which] = into.b_row[which] = into.sample_row[which] = known.row
        into.sample_position[which] = known.output

    def _pad(self, into: Integers) -> None:
        for column in (into.t_token, into.t_place, into.sample_position, into.b_context):
            column[:] = 0
        into.t_slot[:] = self._draft.pool.sink
        into.t_row[:] = into.sample_row[:] = into.b_row[:] = self.padding_row
        into.logit_index[:] = 0  # not read: every token's logits are wanted
        into.b_start[:] = np.arange(into.b_start.shape[-1])

    def _padding(self, counts: Counts) -> torch.Tensor:
        """Integers that captures run on, at the beginning of those of small steps."""
        words = np.zeros(counts.words, np.int64)
        self._pad(views(words, counts))
        self._words[: counts.words] = torch.from_numpy(words)
        self._next.zero_()
        return self._words[: counts.words]


def _advance(integers: Integers, more: torch.Tensor) -> None:
    """Let tokens be further on, each by as much as its row is."""
    by = more[integers.t_row]
    integers.t_place.add_(by)
    integers.sample_position.add_(by)
    integers.b_context.add_(by)
