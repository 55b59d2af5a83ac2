"""Tiles of `lane_product` that a search tries: what fits a multiprocessor and gives it work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile

#: Of an H200: multiprocessors, bytes of shared memory and registers of a thread that a tile may
#: take; the rest is for addresses and what is widened.
PROCESSORS, SHARED, REGISTERS = 132, 225_000, 220
#: The matrix unit's smallest side.
LEAST_COLUMNS = 8

#: For one token (rows of a tile, parts of a row) and (inputs of a step, warps, stages).
_ONE = ((64, 2), (64, 4), (64, 8), (128, 8), (128, 16)), ((256, 4, 2), (256, 4, 3), (128, 4, 4))
#: (rows of a tile, parts of a row, inputs of a step, warps, stages) for up to 16 tokens, and 64.
_FEW = (
    (64, 1, 256, 4, 3),
    (64, 1, 256, 4, 4),
    (64, 2, 256, 4, 3),
    (128, 1, 256, 4, 3),
    (128, 1, 256, 4, 4),
    (128, 1, 256, 8, 3),
    (128, 2, 256, 8, 3),
    (64, 1, 128, 4, 6),
)
_SOME = (
    (64, 1, 256, 4, 3),
    (64, 1, 128, 4, 4),
    (128, 1, 256, 8, 3),
    (128, 1, 128, 8, 4),
    (128, 1, 128, 4, 4),
    (256, 1, 256, 8, 3),
    (256, 1, 128, 8, 4),
)
#: (rows of a tile, tokens of it, inputs of a step, warps, stages).
_MANY = (
    (128, 64, 128, 8, 4),
    (128, 64, 256, 8, 3),
    (128, 64, 128, 4, 4),
    (256, 64, 256, 8, 3),
    (256, 64, 128, 8, 4),
    (128, 128, 128, 8, 4),
    (128, 128, 128, 4, 3),
    (128, 128, 64, 4, 4),
    (256, 128, 128, 8, 3),
    (256, 128, 128, 8, 4),
    (256, 128, 64, 8, 6),
    (256, 128, 128, 16, 4),
    (128, 256, 128, 8, 3),
    (128, 256, 64, 8, 5),
)


def lane_tiles(n: int, k: int, tokens: int, *, gated: bool) -> list[LaneTile]:
    """For so many tokens and a weight [n, k] of 4 bits, gates included."""
    return [tile for tile in _all(tokens) if _fits(tile, n, k, tokens, gated=gated)]


def _all(tokens: int) -> Iterator[LaneTile]:
    if tokens == 1:
        for (rows, parts), (inputs, warps, stages), splits in product(*_ONE, (1, 2)):
            yield LaneTile(rows // parts, 1, inputs, parts, warps, stages, splits)
    elif tokens <= 64:
        shapes, block_t = (_FEW, 16) if tokens <= 16 else (_SOME, 64)
        for (rows, parts, inputs, warps, stages), splits in product(shapes, (1, 2, 4, 8)):
            yield LaneTile(rows // parts, block_t, inputs, parts, warps, stages, splits)
    else:
        for (rows, block_t, inputs, warps, stages), splits in product(_MANY, (1, 2, 3, 4, 8)):
            if tokens <= 128 or block_t >= 128:
                yield LaneTile(rows, block_t, inputs, 1, warps, stages, splits)


def _fits(tile: LaneTile, n: int, k: int, tokens: int, *, gated: bool) -> bool:
    rows, columns = tile.block_n * tile.parts, max(tile.block_t * tile.parts, LEAST_COLUMNS)
    shared = columns * tile.inputs * 2 * tile.stages
    shared += rows * tile.inputs * 17 // 32 * (tile.stages - 1)
    registers = (rows * columns + rows * tile.inputs // 2) // (32 * tile.warps)
    if shared > SHARED or registers > REGISTERS or rows < 16 * tile.warps:
        return False
    if k // tile.inputs % (tile.parts * tile.splits) or (gated and tile.splits > 1):
        return False
    if tile.block_t > 64 and tile.block_t >= 2 * tokens:
        return False
    programs = -(-n // tile.block_n) * -(-tokens // tile.block_t) * tile.splits
    if tile.splits > 1:
        # Parts of sums that are many take longer than idle processors.
        most = 2.1 if tokens > 64 else 5
        if programs > most * PROCESSORS or tokens * tile.splits > 2048:
            return False
    return tokens < 64 or programs >= PROCESSORS // 2
