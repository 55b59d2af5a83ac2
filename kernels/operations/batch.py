"""One step's input to the model: views of tensors that live as long as the executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.operations.adapter_ops import AdapterPlan

Slots = npt.NDArray[np.integer[Any]]

#: A run of adjacent KV slots: [first, end).
Run = tuple[int, int]

#: What tiles of rows with several tokens depend on: a layer's window, and the most queries of one.
TileKind = tuple[int | None, int]

#: In the place of such tiles: chunks of rows that go on from states.
CHUNKS: Final[TileKind] = (None, 0)


class MixerPlan:
    """What mixers of one kind have found out about a step, which their layers share.

    Each operation's is a class of its own, of which each implementation has its own; models hand
    them on.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step as kernels see them, on the device; B may count padding.

    A padding row has context 0: nothing is read for it, and its output is zero.
    """

    #: [B] int32: each row's row of `row_table`.
    b_row: torch.Tensor
    #: [B + 1] int32 offsets into the tokens.
    b_start: torch.Tensor
    #: [B] int32: tokens of KV per row after this step, these tokens included.
    b_context: torch.Tensor
    #: In a captured step, what its rows with several tokens are: see `StepTiles`.
    tiles: Mapping[TileKind, torch.Tensor] | None = None
    #: [T] int64: each token's row of `row_table`; None where nobody asks by token.
    t_row: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of a step as the host knows them; see `ForwardBatch`."""

    b_start: list[int]
    b_context: list[int]
    b_runs: list[list[Run]]
    b_row: list[int]
    single_rows: int
    #: `b_runs` of layers with a window, where these have slots of their own.
    b_window_runs: list[list[Run]] | None = None
    #: How many of each row's last tokens are drafts; None: none are.
    b_drafts: list[int] | None = None
    #: See `ForwardBatch`.
    b_mutual: list[bool] | None = None

    def runs_of(self, window: int | None) -> list[list[Run]]:
        """Those of layers with this window."""
        own = None if window is None else self.b_window_runs
        return self.b_runs if own is None else own

    @property
    def rows(self) -> int:
        """B."""
        return len(self.b_context)


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Where layers with a window have keys and values; see `ForwardBatch`.

    Of positions that no token of the step sees any more, slots may be anybody's.
    """

    t_slot: torch.Tensor
    b_runs: list[list[Run]]
    row_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class GivenEmbeddings:
    """What stands in for rows of the embedding's table (soft prompts, images)."""

    #: [g] int64: for which tokens; their ids mean nothing.
    t_index: torch.Tensor
    #: [g, width] in the model's dtype. What is wider than the table is added to the stream behind
    #: the first layers, for each as many numbers (DeepStack: Meng et al. 2024).
    rows: torch.Tensor

    def add_behind(self, layer: int, x: torch.Tensor) -> None:
        """Add to the stream [T, hidden] what comes behind a layer, if anything does."""
        width = x.shape[1]
        if self.rows.shape[1] >= width * (layer + 2):
            x.index_add_(0, self.t_index, self.rows[:, width * (layer + 1) : width * (layer + 2)])


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens of B rows, ragged: row b owns tokens `b_start[b]` to `b_start[b + 1]`.

    Rows that process one token come first (`single_rows` of them: decode), so that both kinds of
    attention find their rows as a slice.
    """

    #: [T] int64: token ids. Columns of tokens may be longer: what follows belongs to no row, and
    #: what is computed of it means nothing.
    t_token: torch.Tensor
    #: [T] int64: places in their sequences, from 0: what masks, windows, ALiBi and the row table go
    #: by. A row's context is one more than the place of its last token.
    t_place: torch.Tensor
    #: [T] int64: the KV slot that each token's key and value are written to.
    t_slot: torch.Tensor
    #: B + 1 offsets into the tokens.
    b_start: list[int]
    #: Tokens of KV per row after this step, these tokens included.
    b_context: list[int]
    #: Per row: where its KV lies, in order of position; the lengths add up to `b_context`. Where
    #: there is a `row_table` they may be fewer: then nobody has noted where all of it lies.
    b_runs: list[list[Run]]
    #: Per row: its row of `row_table`.
    b_row: list[int]
    #: [rows, max_positions] int32: the slot of (row, position), for kernels that gather by pointer;
    #: empty on a CPU, which reads `b_runs`.
    row_table: torch.Tensor
    #: Leading rows with one token.
    single_rows: int
    #: [n] int64: the tokens whose logits are wanted; None: all, in order.
    logit_index: torch.Tensor | None
    #: Where kernels gather by pointer; None on a CPU, which reads `b_runs`.
    paged: PagedRows | None = None
    #: Tokens that have no id.
    given: GivenEmbeddings | None = None
    #: [T] int64: each token's adapter, from 1; 0: none. None: no token has one.
    t_adapter: torch.Tensor | None = None
    #: None: layers with a window have the slots of all others.
    windows: WindowRows | None = None
    #: What `Operations.plan_adapters` made of that; None: no product is adapted.
    adapters: AdapterPlan | None = None
    #: How many of each row's last tokens are drafts, which may be wrong; None: none are.
    b_drafts: list[int] | None = None
    #: Whether each row's tokens see those behind them, too, in layers that let tokens of images do
    #: so; a row's tokens before these are seen as always. None: no row's do.
    b_mutual: list[bool] | None = None
    #: See `t_position`; None: positions are places.
    t_own_position: torch.Tensor | None = None

    @property
    def t_position(self) -> torch.Tensor:
        """[T] int64, or time, height and width [3, T]: what rotation and learned positions go by.

        Three axes are the case where images are among the tokens (Wang et al. 2024, Qwen2-VL).
        """
        return self.t_place if self.t_own_position is None else self.t_own_position

    def at(self, t_index: torch.Tensor) -> ForwardBatch:
        """The step for products of the tokens at t_index [N] int64 alone, as rows 0 to N - 1."""
        if self.t_adapter is None:
            return self
        return replace(self, t_adapter=self.t_adapter.index_select(0, t_index), adapters=None)

    @property
    def in_windows(self) -> ForwardBatch:
        """The step as layers with a window have it."""
        own = self.windows
        if own is None:
            return self
        return replace(
            self, t_slot=own.t_slot, b_runs=own.b_runs, row_table=own.row_table, windows=None
        )

    @property
    def tokens(self) -> int:
        """T."""
        return self.b_start[-1]

    @property
    def rows(self) -> int:
        """B."""
        return len(self.b_context)


def is_mutual(batch: ForwardBatch, row: int) -> bool:
    """Whether a row's tokens see each other."""
    return batch.b_mutual is not None and batch.b_mutual[row]


def cut_runs(runs: list[Run], length: int) -> bool:
    """Forget all but the first `length` positions of `runs`; False if there are fewer."""
    for at, (first, end) in enumerate(runs):
        if length <= end - first:
            runs[at:] = [(first, first + length)] if length else []
            return True
        length -= end - first
    return length == 0


def append_slots(b_runs: Sequence[list[Run]], lengths: Slots, slots: Slots) -> None:
    """Add slots at the end of each row's runs, joining what is adjacent.

    Args:
        b_runs: of B rows.
        lengths: [B] how many of the slots are each row's.
        slots: of all rows, row after row.
    """
    if not len(slots):
        return
    ends = np.cumsum(lengths)
    begins = np.zeros(len(slots) + 1, np.bool_)
    begins[1:-1] = np.diff(slots) != 1
    begins[ends - lengths] = True
    first = np.flatnonzero(begins[:-1])
    rows, counts = np.searchsorted(ends, first, side="right"), np.diff(first, append=len(slots))
    for row, slot, n in zip(rows.tolist(), slots[first].tolist(), counts.tolist(), strict=True):
        append_run(b_runs[row], slot, slot + n)


def append_run(runs: list[Run], first: int, end: int) -> None:
    """Add a run at the end of `runs`, joining what is adjacent."""
    if runs and runs[-1][1] == first:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((first, end))
