"""A step's rows for layers with states on a GPU: the chunks of those with several tokens.

They are listed on the host, before any layer is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.operations.batch import CHUNKS, ForwardBatch, PagedRows, RaggedRows
from tokenpod.kernels.operations.recurrent_ops import RecurrentPlan

#: What a chunk says: its first token, its tokens, the position of the first, and of a row's first
#: chunk the row's tokens, of others 0; less than 0 where the row has drafts.
FIELDS = 4

#: Tokens of a chunk: on an H200 prompts take 0.65 of the time that they take by 64.
CHUNK = 32

#: A captured step has room for so many rows with several tokens.
MOST_CAPTURED_ROWS = 64


@dataclass(frozen=True, slots=True)
class RecurrentRows(RecurrentPlan):
    """A step's rows for all layers."""

    single_rows: int
    paged: PagedRows
    #: [chunks, FIELDS] int32 on the device; None: all rows have one token.
    chunks: torch.Tensor | None
    #: So many of the first chunks may begin rows.
    rows: int

    @property
    def t_row(self) -> torch.Tensor:
        """[T] int64: each token's state."""
        assert self.paged.t_row is not None
        return self.paged.t_row


def cut_chunks(rows: RaggedRows, chunk: int = CHUNK) -> npt.NDArray[np.int32]:
    """[chunks, FIELDS] of the rows after the first `single_rows`, rows' first chunks first.

    `chunk`: tokens of one at most.
    """
    firsts, others = [], []
    for row in range(rows.single_rows, rows.rows):
        token, end = rows.b_start[row], rows.b_start[row + 1]
        position = rows.b_context[row] - (end - token)
        drafts = rows.b_drafts is not None and rows.b_drafts[row] > 0
        count = token - end if drafts else end - token
        firsts.append((token, min(chunk, end - token), position, count))
        others += [
            (token + done, min(chunk, end - token - done), position + done, 0)
            for done in range(chunk, end - token, chunk)
        ]
    return np.array([*firsts, *others], np.int32).reshape(-1, FIELDS)


@dataclass(frozen=True, slots=True)
class StepTile:
    """How rows of one token go through their memories."""

    #: Values of a head that one program has.
    values: int
    warps: int


def step_tile(tiles: Sequence[tuple[float, StepTile]], pairs: int) -> StepTile:
    """Of tiles by rows times value heads, ascending, that for so many."""
    return next(tile for most, tile in tiles if pairs <= most)


def plan_recurrent(batch: ForwardBatch, chunk: int = CHUNK) -> RecurrentRows:
    """What all layers share; of a captured step its chunks come with its integers.

    `chunk`: tokens of one at most, of steps that are not captured.

    Raises:
        ValueError: the batch has no rows on the device.
    """
    paged = batch.paged
    if paged is None:
        raise ValueError(f"a batch of {batch.rows} rows has no paged rows; these kernels need them")
    if batch.rows == batch.single_rows:
        return RecurrentRows(batch.single_rows, paged, None, 0)
    if paged.tiles is not None:
        chunks = paged.tiles[CHUNKS].view(-1, FIELDS)
        return RecurrentRows(batch.single_rows, paged, chunks, min(len(chunks), MOST_CAPTURED_ROWS))
    rows = RaggedRows(
        batch.b_start,
        batch.b_context,
        batch.b_runs,
        batch.b_row,
        batch.single_rows,
        b_drafts=batch.b_drafts,
    )
    listed = torch.from_numpy(cut_chunks(rows, chunk))
    if batch.t_slot.is_cuda:
        listed = listed.pin_memory()
    chunks = listed.to(batch.t_slot.device, non_blocking=True)
    return RecurrentRows(batch.single_rows, paged, chunks, batch.rows - batch.single_rows)
