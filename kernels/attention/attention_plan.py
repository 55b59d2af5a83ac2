"""The tiles of rows with several queries: listed on the host, before any layer is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.attention.attention_tiles import ExtendTile
from tokenpod.kernels.operations.batch import ForwardBatch, RaggedRows, Run

#: What a tile says: its first token, its queries, the position of the first, and where keys are:
#: the row of the table, or the slot at which position 0 would lie if the run reached back to it.
FIELDS = 4
#: Of a tile whose queries see what is behind them, too: the same, and the position behind the last
#: key that any of them sees.
WHOLE_FIELDS = 5


@dataclass(frozen=True, slots=True)
class TileList:
    """Tiles on the device, int32 [tiles, FIELDS or WHOLE_FIELDS], each kind heaviest first."""

    #: Their keys lie in one run.
    contiguous: torch.Tensor
    #: Their keys are to be gathered.
    scattered: torch.Tensor


def list_tiles(
    batch: ForwardBatch, window: int | None, queries: int, *, causal: bool = True
) -> TileList:
    """Cut the rows after the first `single_rows` into tiles of up to `queries` queries.

    Where some rows are mutual: those alone, or with `causal` the others.
    """
    rows = RaggedRows(batch.b_start, batch.b_context, batch.b_runs, batch.b_row, batch.single_rows)
    rows = replace(rows, b_mutual=batch.b_mutual)
    contiguous, scattered = cut_rows(rows, window, queries, causal=causal)
    listed = np.concatenate([contiguous, scattered])
    on_device = _upload(torch.from_numpy(listed), batch.t_slot.device)
    return TileList(on_device[: len(contiguous)], on_device[len(contiguous) :])


def cut_rows(
    rows: RaggedRows, window: int | None, queries: int, *, causal: bool = True
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """[tiles, FIELDS] each, heaviest first: those with contiguous keys, and the others.

    WHOLE_FIELDS, unless `causal`.
    """
    several = [*range(rows.single_rows, rows.rows)]
    if rows.b_mutual is not None:
        several = [row for row in several if rows.b_mutual[row] is not causal]
    cut = [_cut_row(rows, row, window, queries, causal) for row in several if rows.b_context[row]]
    tiles = np.concatenate([np.empty((0, WHOLE_FIELDS + 2), np.int64), *cut])
    tiles = tiles[np.argsort(-tiles[:, -2], kind="stable")]
    is_contiguous = tiles[:, -1] == 1
    fields = tiles[:, : FIELDS if causal else WHOLE_FIELDS].astype(np.int32)
    return fields[is_contiguous], fields[~is_contiguous]


def unpack_tiles(packed: torch.Tensor) -> TileList:
    """Two lists [n, FIELDS], contiguous and scattered, of packed [2 · n · FIELDS] int32; views."""
    contiguous, scattered = packed.view(2, -1, FIELDS)
    return TileList(contiguous, scattered)


def _cut_row(
    batch: RaggedRows, row: int, window: int | None, queries: int, causal: bool
) -> npt.NDArray[np.int64]:
    """[tiles, WHOLE_FIELDS + 2]: the fields, the number of keys, whether they are contiguous."""
    token, end = batch.b_start[row], batch.b_start[row + 1]
    prefix = batch.b_context[row] - (end - token)
    done = np.arange(0, end - token, queries)
    position = prefix + done
    counts = np.minimum(queries, end - token - done)
    first = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    last = position + counts
    if not causal:
        last = np.minimum(last + (window or end) - 1, batch.b_context[row])
    base, is_contiguous = _bases(batch.runs_of(window)[row], first, last)
    source = np.where(is_contiguous, base, batch.b_row[row])
    keys = last - first
    return np.stack([token + done, counts, position, source, last, keys, is_contiguous], axis=1)


def _bases(
    runs: list[Run], first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Of positions [first, last): slot less position, and whether one run holds all of them."""
    bounds = np.array(runs, dtype=np.int64).reshape(-1, 2)
    starts = np.concatenate(([0], np.cumsum(bounds[:, 1] - bounds[:, 0])))
    if starts[-1] < last[-1]:
        # Where the keys lie was not noted on the host: the row table knows.
        return np.zeros_like(first), np.zeros(len(first), np.bool_)
    run = np.searchsorted(starts, first, side="right") - 1
    return bounds[run, 0] - starts[run], last <= starts[run + 1]


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def queries_per_tile(heads: int, kv_heads: int, tile: ExtendTile) -> int:
    """How many queries' heads fit."""
    return tile.block_m // (heads // kv_heads)
