"""Texts that a step reads as a whole, cut into tiles of queries: on the host, for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.operations.batch import RaggedRows, TileKind

#: What a tile says: its first token and its number of tokens, all of one text; the text's first
#: token, and its end.
TEXT_FIELDS = 4

#: Compute capability from which `TEXT_TILES` fit.
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class TextTile:
    """How the kernel cuts the square of queries and keys of a text."""

    #: Queries of a program, and keys of an iteration.
    block_m: int
    block_n: int
    warps: int
    stages: int


#: By head size, padded to a power of two from 64 on, and bytes of a number.
TEXT_TILES = {
    (64, 2): TextTile(64, 64, 4, 3),
    (128, 2): TextTile(64, 64, 4, 3),
    (256, 2): TextTile(128, 64, 8, 2),
    (512, 2): TextTile(64, 32, 8, 1),
    # For tests: three products of TF32 make one of float32.
    (64, 4): TextTile(32, 32, 4, 2),
    (128, 4): TextTile(32, 32, 4, 2),
    (256, 4): TextTile(32, 16, 4, 2),
    (512, 4): TextTile(16, 16, 4, 1),
}
#: What 99 KB of shared memory hold.
_SMALL_TILES = {
    **TEXT_TILES,
    (64, 2): TextTile(64, 64, 4, 2),
    (128, 2): TextTile(64, 64, 4, 2),
    (256, 2): TextTile(64, 32, 4, 2),
    (512, 2): TextTile(32, 16, 4, 1),
    (256, 4): TextTile(16, 16, 4, 2),
}


def text_tile_for(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> TextTile:
    """The tile for heads of up to 512 numbers of 2 or 4 bytes."""
    table = TEXT_TILES if _HOPPER <= capability < (12, 0) else _SMALL_TILES
    return table[max(64, 1 << (head_dim - 1).bit_length()), dtype.itemsize]


def cut_texts(b_start: Sequence[int], queries: int) -> npt.NDArray[np.int32]:
    """[tiles, TEXT_FIELDS] of up to `queries` tokens each, those of the longest texts first.

    `b_start`: [B + 1] offsets of texts into the tokens.
    """
    start = np.asarray(b_start, np.int64)
    lengths = np.diff(start)
    # What takes longest must not begin last (Graham 1969); tiles of a text share keys in a cache.
    order = np.argsort(-lengths, kind="stable")
    lengths, start = lengths[order], start[:-1][order]
    count = -(-lengths // queries)
    of = np.repeat(np.arange(len(lengths)), count)
    done = (np.arange(len(of)) - (np.cumsum(count) - count)[of]) * queries
    first, end = start[of], (start + lengths)[of]
    token = first + done
    return np.stack((token, np.minimum(queries, end - token), first, end), 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class CapturedTexts:
    """A captured step's texts as `StepTiles`: a list of tiles of each size, filled up."""

    #: Queries of a tile.
    sizes: tuple[int, ...]
    #: Texts that a step has room for.
    rows: int

    def count(self, tokens: int) -> int:
        """Tiles are full, but for each text's last."""
        return len(self.sizes) * (tokens // min(self.sizes) + self.rows) * TEXT_FIELDS

    def fill(self, rows: RaggedRows, into: npt.NDArray[np.int32]) -> bool:
        """Write the tiles of these texts; there is always room for them."""
        lists = into.reshape(len(self.sizes), -1, TEXT_FIELDS)
        for queries, room in zip(self.sizes, lists, strict=True):
            tiles = cut_texts(rows.b_start, queries)
            room[: len(tiles)], room[len(tiles) :] = tiles, 0
        return True

    def by_kind(self, numbers: torch.Tensor) -> dict[TileKind, torch.Tensor]:
        """Parts of `numbers` on the device by queries of a tile, without a copy."""
        lists = numbers.view(len(self.sizes), -1, TEXT_FIELDS)
        return {(None, queries): own for queries, own in zip(self.sizes, lists, strict=True)}
