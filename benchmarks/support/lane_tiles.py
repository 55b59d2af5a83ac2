"""Tiles of `lane_product` that a search tries: what fits a multiprocessor and gives it work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenpod.kernels.products.quantised.quantised_tiles import LaneTile

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
        (256, 1, 64, 256, 8, 3),
        (128, 1, 64, 256, 8, 3),
        (128, 1, 64, 128, 8, 4),
        (64, 1, 64, 256, 4, 3),
    ),
    1 << 30: (
        (128, 1, 256, 128, 8, 3),
        (256, 1, 128, 128, 8, 4),
        (128, 1, 128, 128, 8, 4),
        (128, 1, 128, 128, 8, 2),
        (128, 1, 128, 128, 4, 2),
        (128, 1, 128, 256, 8, 2),
        (64, 1, 128, 128, 4, 3),
        (64, 1, 128, 256, 4, 2),
    ),
}


def lane_tiles(n: int, k: int, tokens: int, *, gated: bool) -> list[LaneTile]:
    """For so many tokens and a weight [n, k] of 4 bits, gates included."""
    return list(dict.fromkeys(_all(n, k, tokens, gated=gated)))


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
            yield tile
            yield replace(tile, described=block_t >= 64)
