"""What rows keep where a model has caches of its own: by row, in place of the pool's slots.

    rows      3: tokens, prompt        7: ...       4: ...
                  \\                   /              |
    batches      [ rows 3, 7: one cache ]        [ row 4 ]

Rows that decode together have one cache, shorter ones padded at the left. Who steps with others
than before is cut out of one batch and put into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.models.tier.trees import Widths, joined, selected


@dataclass
class Batch:
    """Rows with one cache."""

    rows: list[int]
    #: Tokens of each that are in it, and tokens that each one's encoder has read.
    lengths: list[int]
    encoded: list[int]
    state: Any

    @property
    def widths(self) -> Widths:
        """Of the padded state."""
        return Widths(max(self.lengths), max(self.encoded))

    def part(self, rows: Sequence[int]) -> Batch:
        """These of its rows, with no more padding than they need."""
        index = [self.rows.index(row) for row in rows]
        lengths, encoded = [self.lengths[i] for i in index], [self.encoded[i] for i in index]
        widths = Widths(max(lengths), max(encoded))
        return Batch(list(rows), lengths, encoded, selected(self.state, index, widths))


@dataclass
class Row:
    """A sequence."""

    #: Tokens of its prompt, and how many of all have come.
    prompt: int
    length: int = 0
    #: [length] int64, where pieces are computed anew with all that came before.
    tokens: torch.Tensor | None = None
    #: Where its cache is; None: nothing is computed yet.
    batch: Batch | None = None


class RowStates(KVPool):
    """The pool of a model that keeps its state by itself: slots are counted, and hold nothing.

    Args:
        slots: what the scheduler hands out.
        dtype: of the model.
        device: of the model.
        unused: arguments of other pools.
    """

    def __init__(
        self, *, slots: int, dtype: torch.dtype, device: torch.device, **unused: Any
    ) -> None:
        del unused
        super().__init__(layouts=(), slots=slots, dtype=dtype, device=device)
        self.rows: dict[int, Row] = {}

    def take_row(self, row: int, prompt: int) -> None:
        """A sequence with so many prompt tokens gets a row: nothing is known of it yet."""
        self.rows[row] = Row(prompt)

    def release_rows(self, rows: Sequence[int]) -> None:
        """Forget them. A batch's memory goes when it is cut next, or with its last row."""
        for row in rows:
            self.rows.pop(row, None)

    def together(self, rows: Sequence[int]) -> Batch:
        """One batch of these rows, in an order of its own, and of no others."""
        found: list[tuple[Batch, list[int]]] = []
        for row in rows:
            batch = self.rows[row].batch
            assert batch is not None, f"row {row} has no state"
            own = next((own for known, own in found if known is batch), None)
            if own is None:
                found.append((batch, own := []))
            own.append(row)
        (first, own), *others = found
        if not others and len(own) == len(first.rows):
            return first
        parts = [self._cut(batch, own) for batch, own in found]
        whole = parts[0]
        if others:
            widths = Widths(
                max(part.widths.text for part in parts), max(part.widths.encoded for part in parts)
            )
            whole = Batch(
                [row for part in parts for row in part.rows],
                [length for part in parts for length in part.lengths],
                [length for part in parts for length in part.encoded],
                joined([part.state for part in parts], widths),
            )
        for row in whole.rows:
            self.rows[row].batch = whole
        return whole

    def _cut(self, batch: Batch, rows: list[int]) -> Batch:
        """These rows of a batch; those that stay become another."""
        if len(rows) == len(batch.rows):
            return batch
        rest = [row for row in batch.rows if row not in rows and self._has(row, batch)]
        if rest:
            left = batch.part(rest)
            for row in rest:
                self.rows[row].batch = left
        return batch.part(rows)

    def _has(self, row: int, batch: Batch) -> bool:
        """Whether the row is still that sequence's."""
        known = self.rows.get(row)
        return known is not None and known.batch is batch
