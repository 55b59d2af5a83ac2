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


def lane_tiles(n: int, k: int, tokens: int, *, gated: bool) -> list[LaneTile]:
    """For so many tokens and a weight [n, k] of 4 bits, gates included."""
    return [tile for tile in _all(tokens) if _fits(tile, n, k, tokens, gated=gated)]


def _all(tokens: int) -> Iterator[LaneTile]:
    if tokens <= 16:
        shapes = [(64, 1), (128, 1), (64, 2), (64, 4), (128, 4), (64, 8), (128, 8), (128, 16)]
        steps = [(128, 3), (128, 4), (128, 6), (256, 2), (256, 3), (256, 4), (512, 2)]
        for (rows, parts), (inputs, stages), warps, splits in product(
            shapes, steps, (4, 8), (1, 2, 4, 8)
        ):
            if tokens == 1 or parts <= 4:
                yield LaneTile(rows // parts, 16, inputs, parts, warps, stages, splits)
        for rows, parts in shapes if tokens == 1 else []:
            yield LaneTile(rows // parts, 16, 256, parts, 4, 3, 1, 2048)
    elif tokens <= 64:
        steps = [(128, 3), (128, 4), (128, 6), (256, 2), (256, 3), (256, 4)]
        for rows, (inputs, stages), warps, splits in product(
            (64, 128, 256), steps, (4, 8), (1, 2, 3, 4, 8)
        ):
            yield LaneTile(rows, 64, inputs, 1, warps, stages, splits)
    else:
        sides = [(128, 64), (256, 64), (128, 128), (256, 128), (128, 256)]
        steps = [(128, 2), (128, 3), (128, 4), (256, 2), (256, 3)]
        for (rows, columns), (inputs, stages), warps, splits in product(
            sides, steps, (4, 8, 16), (1, 2, 3, 4, 8)
        ):
            if tokens <= 256 or columns >= 128:
                yield LaneTile(rows, columns, inputs, 1, warps, stages, splits)


def _fits(tile: LaneTile, n: int, k: int, tokens: int, *, gated: bool) -> bool:
    rows, columns = tile.block_n * tile.parts, min(tile.block_t, tokens)
    columns = max(columns * tile.parts, LEAST_COLUMNS)
    shared = columns * tile.inputs * 2 * tile.stages
    shared += rows * tile.inputs * 17 // 32 * (tile.stages - 1)
    registers = (rows * columns + rows * tile.inputs // 2) // (32 * tile.warps)
    if shared > SHARED or registers > REGISTERS or rows < 16 * tile.warps:
        return False
    if k // tile.inputs % (tile.parts * tile.splits) or (gated and tile.splits > 1):
        return False
    programs = -(-n // tile.block_n) * -(-tokens // tile.block_t) * tile.splits
    if tile.splits > 1:
        # Parts of sums that are many take longer than idle processors.
        most = 2.1 if tokens > 64 else 5
        if programs > most * PROCESSORS or tokens * tile.splits > 2048:
            return False
    return tokens < 64 or programs >= PROCESSORS // 2
