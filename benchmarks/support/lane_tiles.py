"""Tiles of `lane_product` and `multiply_rounded` that a search tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile, MatrixTile

#: Of an H200.
PROCESSORS = 132
#: Programs that share a row: as many as that programs are so many times the multiprocessors.
WAVES = {1: (4,), 16: (2, 4), 64: (1, 2), 1 << 30: (1,)}
MOST_SPLITS = (8, 4, 3, 2, 1)

#: Rows of a tile, parts of a row, tokens, inputs of a step, warps, stages; by the most tokens.
_SHAPES = {
    1: (
        (64, 2, 1, 256, 4, 3),
        (64, 4, 1, 256, 4, 2),
        (64, 8, 1, 256, 4, 2),
        (64, 8, 1, 128, 4, 4),
        (128, 8, 1, 256, 4, 3),
    ),
    16: (
        (128, 1, 16, 256, 4, 4),
        (64, 1, 16, 256, 4, 3),
        (64, 2, 16, 256, 4, 3),
    ),
    64: (
        (128, 1, 64, 256, 8, 3),
        (128, 1, 64, 128, 8, 4),
        (128, 1, 64, 128, 4, 3),
        (64, 1, 64, 256, 4, 3),
        (64, 1, 64, 128, 4, 4),
    ),
    1 << 30: (
        (128, 1, 128, 128, 8, 2),
        (128, 1, 128, 128, 8, 3),
        (128, 1, 128, 128, 4, 2),
        (128, 1, 128, 64, 4, 4),
        (128, 1, 128, 64, 4, 3),
        (64, 1, 128, 128, 4, 2),
        (64, 1, 128, 128, 4, 3),
        (64, 1, 128, 128, 4, 4),
        (64, 1, 128, 64, 4, 4),
        (64, 1, 256, 128, 4, 2),
        (64, 1, 256, 64, 4, 3),
        (128, 1, 256, 128, 8, 2),
        (128, 1, 64, 128, 4, 3),
    ),
}


def lane_tiles(n: int, k: int, tokens: int, *, gated: bool, least: int = 128) -> list[LaneTile]:
    """For so many tokens, a weight [n, k] in lanes, gates included, and blocks of `least`."""
    tiles = dict.fromkeys(_all(n, k, tokens, gated=gated))
    return [tile for tile in tiles if tile.inputs >= least]


def _all(n: int, k: int, tokens: int, *, gated: bool) -> Iterator[LaneTile]:
    shapes = next(shapes for most, shapes in _SHAPES.items() if tokens <= most)
    waves = next(waves for most, waves in WAVES.items() if tokens <= most)
    for rows, parts, block_t, inputs, warps, stages in shapes:
        programs = -(-n * parts // rows) * -(-tokens // block_t)
        for wave in waves:
            splits = next(
                s
                for s in MOST_SPLITS
                if s == 1
                or (
                    (not gated and programs * s <= 1.03 * wave * PROCESSORS)
                    and k // inputs % (parts * s) == 0
                )
            )
            tile = LaneTile(rows // parts, block_t, inputs, parts, warps, stages, splits)
            if block_t < 128:
                yield tile
            yield replace(tile, described=block_t >= 64)


#: Tiles with so many are tried without descriptors, too.
LEAST_STAGES = 3
#: Rows of a tile, tokens, inputs of a step, warps, stages.
_MATRIX_SHAPES = (
    (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 16, 3),
    (256, 128, 128, 16, 3),
    (128, 64, 128, 8, 4),
    (128, 64, 128, 4, 4),
    (64, 128, 128, 8, 4),
    (64, 64, 128, 4, 5),
)
#: The same of fewer tokens.
_FEW_MATRIX_SHAPES = (
    (128, 64, 128, 8, 4),
    (128, 64, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (32, 64, 128, 4, 5),
    (16, 64, 128, 4, 5),
)


def matrix_tiles(n: int, k: int, tokens: int, *, gated: bool) -> list[MatrixTile]:
    """For so many tokens and a weight [n, k] of e4m3 in blocks, gates included."""
    found = []
    few = tokens < 64
    for rows, block_t, block_k, warps, stages in _FEW_MATRIX_SHAPES if few else _MATRIX_SHAPES:
        if rows > 128 and not gated:
            continue
        block_n = rows // 2 if gated else rows
        programs = -(-n // rows) * -(-tokens // block_t)
        for wave in (2, 4) if few else (1, 2):
            splits = next(
                s
                for s in MOST_SPLITS
                if s == 1
                or (
                    not gated and programs * s <= 1.03 * wave * PROCESSORS and k // block_k % s == 0
                )
            )
            tile = MatrixTile(block_n, block_k, block_t, warps, stages, splits=splits)
            found += [tile] if few else [replace(tile, described=True)]
            found += [tile] * (stages == LEAST_STAGES and warps == 8)
    return list(dict.fromkeys(found))
