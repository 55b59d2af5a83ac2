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
    several = [row for row in range(rows.single_rows, rows.rows) if rows.b_context[row]]
    if rows.b_mutual is not None:
        several = [row for row in several if rows.b_mutual[row] is not causal]
    row = np.array(several, dtype=np.int64)
    start, context = np.array(rows.b_start, dtype=np.int64), np.array(rows.b_context)
    tokens = start[row + 1] - start[row]
    # Of each tile: its row, and how many of the row's queries come before it.
    count = -(-tokens // queries)
    of = np.repeat(np.arange(len(row)), count)
    done = (np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)) * queries
    row, tokens, context = row[of], tokens[of], context[row[of]]
    position = context - tokens + done
    counts = np.minimum(queries, tokens - done)
    first = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0)
    last = position + counts
    if not causal:
        last = np.minimum(last + (context if window is None else window) - 1, context)
    base, is_contiguous = _bases(rows.runs_of(window), several, of, first, last)
    source = np.where(is_contiguous, base, np.array(rows.b_row)[row])
    fields = [start[row] + done, counts, position, source, last]
    tiles = np.stack(fields[: FIELDS if causal else WHOLE_FIELDS], axis=1).astype(np.int32)
    heaviest = np.argsort(first - last, kind="stable")
    tiles, is_contiguous = tiles[heaviest], is_contiguous[heaviest]
    return tiles[is_contiguous], tiles[~is_contiguous]


def unpack_tiles(packed: torch.Tensor) -> TileList:
    """Two lists [n, FIELDS], contiguous and scattered, of packed [2 · n · FIELDS] int32; views."""
    contiguous, scattered = packed.view(2, -1, FIELDS)
    return TileList(contiguous, scattered)


def _bases(
    b_runs: list[list[Run]],
    several: list[int],
    of: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Of positions [first, last): slot less position, and whether one run holds all of them.

    `of` says of which of the rows `several` they are.
    """
    # Runs of all rows behind one another: where each begins among its row's positions.
    runs = [b_runs[row] for row in several]
    bounds = np.array([run for each in runs for run in each], dtype=np.int64).reshape(-1, 2)
    number = np.array([len(each) for each in runs], dtype=np.int64)
    lengths = bounds[:, 1] - bounds[:, 0]
    ends = np.cumsum(lengths)
    row_end = np.concatenate(([0], ends))[np.cumsum(number)]
    before = np.concatenate(([0], row_end[:-1])) if len(row_end) else row_end
    # Where a row's keys lie may not have been noted on the host: then the row table knows.
    furthest = np.zeros_like(row_end)
    np.maximum.at(furthest, of, last)
    noted = (row_end - before >= furthest)[of]
    run = np.searchsorted(ends, before[of] + first, side="right").clip(max=max(len(ends) - 1, 0))
    if not len(ends):
        return np.zeros_like(first), np.zeros(len(first), np.bool_)
    base = bounds[run, 0] - (ends[run] - lengths[run] - before[of])
    return base, noted & (last <= ends[run] - before[of])


def _upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def queries_per_tile(heads: int, kv_heads: int, tile: ExtendTile) -> int:
    """How many queries' heads fit."""
    return tile.block_m // (heads // kv_heads)
