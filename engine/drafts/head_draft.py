"""A head as a draft model: EAGLE-3's (`models.eagle`), or a layer of the checkpoint (`models.mtp`).

The entry of a position p has the slot of p, so its keys and values depend on nothing but the tokens
up to p, as the served model's do: a prefix that is found in the cache is one for both. Features lie
in the head's pool, too. Position 0 has no entry: attention sees slots from position 1 on.

    slot of position      0     1     2     3
    feature              f0    f1    f2    f3      of the served model, or of small steps meanwhile
    entry                 -   t1f0  t2f1  t3f2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from tokenpod.engine.steps.executor import Model
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.attention_ops import StepTiles
from tokenpod.kernels.operations.batch import ForwardBatch, RaggedRows, Run
from tokenpod.models.decoders.decoder import Decoder


class Head(Protocol):
    """What guesses from the served model's features."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the served model before which its stream is read."""
        ...

    def features_of(self, hidden: torch.Tensor, streams: list[torch.Tensor]) -> torch.Tensor:
        """[T, width] features of positions, of what the served model has computed there."""
        ...

    @staticmethod
    def features(pool: KVPool) -> torch.Tensor:
        """[slots + 1, width]: of each slot's position."""
        ...

    def forward(
        self, t_token: torch.Tensor, t_before: torch.Tensor, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        """[T, width] streams of entries, whose keys and values it writes to the pool."""
        ...

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary] of streams [n, width]."""
        ...

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps of up to so many rows describe rows with several tokens."""
        ...


@dataclass(slots=True)
class HeadDraft:
    """A head and its pool; see `draft.Drafter`."""

    head: Head
    pool: KVPool
    most: int
    each: int = 1
    #: It reads what the served model has computed.
    behind: bool = True

    def compute(
        self,
        served: Model,
        batch: ForwardBatch,
        pool: KVPool,
        own: ForwardBatch,
        *,
        follow: bool = True,
    ) -> torch.Tensor:
        """Run a step of the served model, [T, hidden]; the head follows it, now or by `follow`."""
        assert isinstance(served, Decoder)
        hidden, streams = served.forward_tapped(batch, pool, self.head.taps)
        features = self.head.features_of(hidden, streams)
        self.head.features(self.pool).index_copy_(0, batch.t_slot, features)
        if follow:
            self.follow(own)
        return hidden

    def follow(self, own: ForwardBatch) -> None:
        """Let the head compute what the next small step needs of a step."""
        entries = _entries(own)
        if len(entries.t_token):
            self.head.forward(entries.t_token, entries.t_before, entries.batch, self.pool)

    def logits(self, batch: ForwardBatch, drafts: int) -> torch.Tensor:
        """[drafts * n, vocabulary] what may follow the tokens of a small step."""
        assert drafts == 1
        entries = _entries(batch)
        stream = self.head.forward(entries.t_token, entries.t_before, entries.batch, self.pool)
        self.head.features(self.pool).index_copy_(0, entries.batch.t_slot, stream)
        return self.head.logits(stream)

    def prepare_capture(self, rows: int) -> StepTiles:
        """How captured steps describe rows with several tokens to the head."""
        return self.head.prepare_capture(rows)

    def tile_rows(self, rows: RaggedRows) -> RaggedRows:
        """A step's rows as the head's own tiles are to have them."""
        return _without_firsts(rows)


@dataclass(frozen=True, slots=True)
class _Entries:
    """What `Head.forward` is given."""

    t_token: torch.Tensor
    t_before: torch.Tensor
    batch: ForwardBatch


def _entries(batch: ForwardBatch) -> _Entries:
    """The entries of a step's tokens; on a device, first tokens have one that nobody reads."""
    batch = replace(batch, given=None, t_adapter=None, adapters=None, b_drafts=None)
    if batch.paged is None:
        return _entries_of_runs(batch)
    before = (batch.t_place - 1).clamp(min=0)
    assert batch.paged.t_row is not None
    t_before = batch.row_table[batch.paged.t_row, before].long()
    rows = RaggedRows(batch.b_start, batch.b_context, batch.b_runs, batch.b_row, batch.single_rows)
    if batch.paged.tiles is None and rows.rows > rows.single_rows:
        rows = _without_firsts(rows)
    own = replace(
        batch,
        t_place=before,
        t_own_position=_positions_before(batch.t_own_position),
        b_start=rows.b_start,
        b_context=rows.b_context,
        b_runs=rows.b_runs,
        b_row=rows.b_row,
        row_table=batch.row_table[:, 1:],
        paged=replace(batch.paged, b_context=(batch.paged.b_context - 1).clamp(min=0)),
    )
    return _Entries(batch.t_token, t_before, own)


def _without_firsts(rows: RaggedRows) -> RaggedRows:
    """The rows without position 0: a token there becomes a row of its own, which sees nothing."""
    b_start, b_context, b_row = [0], list[int](), list[int]()
    b_runs: list[list[Run]] = []
    for row, (context, runs, which) in enumerate(
        zip(rows.b_context, rows.b_runs, rows.b_row, strict=True)
    ):
        first, end = rows.b_start[row], rows.b_start[row + 1]
        if row >= rows.single_rows and context == end - first:
            b_start.append(first + 1)
            b_context.append(0)
            b_runs.append([])
            b_row.append(which)
        b_start.append(end)
        b_context.append(max(context - 1, 0))
        b_runs.append(_from_second(runs))
        b_row.append(which)
    return RaggedRows(b_start, b_context, b_runs, b_row, rows.single_rows)


def _entries_of_runs(batch: ForwardBatch) -> _Entries:
    """The same where rows are known by runs of slots: first tokens are left out."""
    kept: list[int] = []
    before: list[np.ndarray] = []
    b_start, b_context, b_row, singles = [0], list[int](), list[int](), 0
    b_runs: list[list[Run]] = []
    for row, (context, runs) in enumerate(zip(batch.b_context, batch.b_runs, strict=True)):
        first, end = batch.b_start[row], batch.b_start[row + 1]
        if context == end - first:
            first += 1
        if first == end:
            continue
        kept += range(first, end)
        before.append(_slots(runs)[context - 1 - (end - first) : context - 1])
        b_start.append(len(kept))
        b_context.append(context - 1)
        b_runs.append(_from_second(runs))
        b_row.append(batch.b_row[row])
        singles += row < batch.single_rows
    own = replace(
        batch,
        t_place=batch.t_place[kept] - 1,
        t_own_position=_positions_before(batch.t_own_position, kept),
        t_slot=batch.t_slot[kept],
        b_start=b_start,
        b_context=b_context,
        b_runs=b_runs,
        b_row=b_row,
        single_rows=singles,
    )
    t_before = torch.from_numpy(np.concatenate([*before, np.empty(0, np.int64)]))
    return _Entries(batch.t_token[kept], t_before, own)


def _positions_before(
    t_position: torch.Tensor | None, kept: list[int] | slice = slice(None)
) -> torch.Tensor | None:
    """Those of the tokens before, as in text: entries of images are as good as guesses."""
    return None if t_position is None else t_position[..., kept] - 1


def _slots(runs: Sequence[Run]) -> np.ndarray:
    """[positions] int64 slots."""
    return np.concatenate([np.arange(first, end) for first, end in runs])


def _from_second(runs: list[Run]) -> list[Run]:
    """The runs without the first slot."""
    if not runs:
        return []
    first, end = runs[0]
    return [(first + 1, end), *runs[1:]] if end - first > 1 else runs[1:]
