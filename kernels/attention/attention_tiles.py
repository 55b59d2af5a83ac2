"""Tile sizes of the attention kernels: data, found by `benchmarks/run.py attention`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How decode attention walks a row."""

    #: Keys and values per iteration.
    block: int
    warps: int
    #: Blocks under way, the one in use included.
    stages: int
    #: Programs to start per multiprocessor, if there are rows and blocks enough.
    programs: int
    #: Blocks that are asked for before the step's own keys and values are there.
    ahead: int = 0
    #: Programs that share a row and key/value head: more cost more to merge than they bring.
    most_splits: int = 32


#: (most pairs of a row and a key/value head, tile), ascending: how many programs there are decides
#: how much of a multiprocessor each can have.
DecodeTiles = tuple[tuple[float, DecodeTile], ...]


def always(tile: DecodeTile) -> DecodeTiles:
    """The same for any number of pairs."""
    return ((float("inf"), tile),)


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """How extend attention cuts the square of queries and keys."""

    #: Rows of the product: (query, head of a group) pairs.
    block_m: int
    #: Keys and values per iteration.
    block_n: int
    warps: int
    stages: int
    #: Programs of a tile, each with so many times fewer numbers of the values: sums of long heads
    #: take the registers that more queries could have. Each multiplies queries with keys anew.
    parts: int = 1


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """What one size of heads and numbers gets."""

    decode: DecodeTiles
    extend: ExtendTile


#: Heads of 128, 2 bytes a number: few pairs get much each, and more of them than run at a time get
#: less, so that one program's start hides behind its neighbours' work.
_DECODE_128 = (
    (64, DecodeTile(128, 4, 3, 4, most_splits=16)),
    (640, DecodeTile(32, 2, 4, 4)),
    (float("inf"), DecodeTile(64, 4, 3, 4)),
)

#: By head size, padded to a power of two, and bytes of a number.
TILES = {
    (64, 2): HeadTiles(always(DecodeTile(128, 4, 4, 4)), ExtendTile(128, 128, 8, 2)),
    (128, 2): HeadTiles(_DECODE_128, ExtendTile(128, 64, 8, 3)),
    (256, 2): HeadTiles(always(DecodeTile(64, 4, 3, 2)), ExtendTile(128, 64, 8, 2)),
    (512, 2): HeadTiles(always(DecodeTile(32, 4, 2, 2)), ExtendTile(128, 64, 8, 1, parts=2)),
    # For tests: three products of TF32 make one of float32.
    (64, 4): HeadTiles(always(DecodeTile(64, 4, 3, 4)), ExtendTile(32, 32, 4, 2)),
    (128, 4): HeadTiles(always(DecodeTile(32, 4, 3, 2)), ExtendTile(32, 32, 4, 2)),
    (256, 4): HeadTiles(always(DecodeTile(32, 4, 2, 2)), ExtendTile(32, 16, 4, 2)),
    (512, 4): HeadTiles(always(DecodeTile(16, 4, 2, 1)), ExtendTile(16, 16, 4, 1)),
}

#: The same of heads of 128, a byte a number.
_EIGHT_BIT_DECODE_128 = (
    (64, DecodeTile(128, 4, 3, 4, most_splits=24)),
    (256, DecodeTile(128, 4, 3, 3)),
    (640, DecodeTile(64, 4, 3, 4)),
    (float("inf"), DecodeTile(64, 2, 3, 4)),
)

#: Of a pool of 8 bits, by head size, on any device that can read one.
EIGHT_BIT_TILES = {
    64: always(DecodeTile(64, 2, 4, 8)),
    128: _EIGHT_BIT_DECODE_128,
    256: always(DecodeTile(32, 4, 3, 4)),
    512: always(DecodeTile(32, 4, 2, 2)),
}

#: What multiprocessors older or smaller than Hopper's can hold (99 KB of shared memory to a
#: program); compute capability 8.0 has 163 KB, and gets these too.
SMALL_TILES = {
    (64, 2): HeadTiles(always(DecodeTile(128, 4, 3, 4)), ExtendTile(128, 64, 8, 2)),
    (128, 2): HeadTiles(always(DecodeTile(64, 4, 3, 4)), ExtendTile(128, 32, 8, 2)),
    (256, 2): HeadTiles(always(DecodeTile(32, 4, 3, 2)), ExtendTile(64, 32, 4, 2)),
    (512, 2): HeadTiles(always(DecodeTile(16, 4, 2, 1)), ExtendTile(32, 16, 4, 1)),
    (64, 4): HeadTiles(always(DecodeTile(64, 4, 3, 4)), ExtendTile(32, 32, 4, 2)),
    (128, 4): HeadTiles(always(DecodeTile(32, 4, 3, 2)), ExtendTile(32, 32, 4, 2)),
    (256, 4): HeadTiles(always(DecodeTile(16, 4, 2, 2)), ExtendTile(16, 16, 4, 2)),
    (512, 4): HeadTiles(always(DecodeTile(16, 4, 1, 1)), ExtendTile(16, 16, 4, 1)),
}

#: Query heads of a key/value head that decode tiles were measured for, at most.
MEASURED_GROUP = 16

#: Of single rows that are walked along as others are: the least rows of a program's product, and
#: those where so many pairs of a row and a key/value head make small programs faster.
LEAST_SINGLE_ROWS = 64
LEAST_ROWS = 16
MANY_PAIRS = 512
#: Programs of a pair, where fewer would leave most of a GPU idle.
FEW_PAIRS = 16
PARTS_OF_FEW = 4

#: Compute capability from which `TILES` fit.
HOPPER = (9, 0)


def tiles_for(head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> HeadTiles:
    """The tiles for heads of up to 512 numbers of 2 or 4 bytes."""
    table = TILES if HOPPER <= capability < (12, 0) else SMALL_TILES
    return table[_padded(head_dim), dtype.itemsize]


def decode_tile_for(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], pairs: int, group: int = 1
) -> DecodeTile:
    """How rows of heads of up to 512 numbers, in a pool of 1, 2 or 4 bytes, are decoded.

    Args:
        head_dim: numbers of a head.
        dtype: of the pool.
        capability: of the GPU.
        pairs: rows times key/value heads.
        group: query heads that share a key/value head.
    """
    if dtype.itemsize == 1:
        tiles = EIGHT_BIT_TILES[_padded(head_dim)]
    else:
        tiles = tiles_for(head_dim, dtype, capability).decode
    tile = next(tile for most, tile in tiles if pairs <= most)
    # Sums of many heads take the registers that blocks would.
    return tile if group <= MEASURED_GROUP else replace(tile, block=min(tile.block, 32))


def extend_tile_for(
    head_dim: int, dtype: torch.dtype, capability: tuple[int, int], group: int
) -> ExtendTile:
    """How rows of several queries are cut, `group` query heads sharing a key/value head.

    The heads of one query fit into a tile, whose keys are fewer if it grows for that.
    """
    tile = tiles_for(head_dim, dtype, capability).extend
    if group <= tile.block_m:
        return tile
    grown = 1 << (group - 1).bit_length()
    return replace(tile, block_m=grown, block_n=max(16, tile.block_n * tile.block_m // grown))


def single_tile(tile: ExtendTile, group: int, pairs: int) -> ExtendTile:
    """What walks along rows of one query as `tile` does along several, and sums in that order.

    Each warp has as many rows of the product and the same keys. On an H200 all of these agreed bit
    by bit, in programs of 16 rows and 64, alone and in parts.

    Args:
        tile: of rows of several queries.
        group: query heads that share a key/value head.
        pairs: rows times key/value heads.
    """
    least, stages, parts = LEAST_SINGLE_ROWS, tile.stages, tile.parts
    if pairs <= FEW_PAIRS and tile.parts == 1:
        parts = PARTS_OF_FEW
    elif pairs >= MANY_PAIRS and tile.block_m == LEAST_ROWS * tile.warps:
        least, stages = LEAST_ROWS, min(stages, 2)
    block_m = min(tile.block_m, max(least, 1 << (group - 1).bit_length()))
    warps = max(1, tile.warps * block_m // tile.block_m)
    return replace(tile, block_m=block_m, warps=warps, stages=stages, parts=parts)


def _padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())
