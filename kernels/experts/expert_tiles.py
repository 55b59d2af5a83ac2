"""Tile sizes of the experts' products: timed by `benchmarks/run.py experts`."""

from __future__ import annotations

from dataclasses import dataclass

#: Compute capability from which `TILES` fit.
HOPPER = (9, 0)


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How one program of a product walks along an expert's weight."""

    #: Rows of the weight: half of them gates where there are gates.
    block_n: int
    #: Their elements that it reads at a time.
    block_k: int
    warps: int
    #: Tiles in flight.
    stages: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Both products of a block, which cut an expert's tokens alike."""

    #: Tokens of one expert that a program works for.
    block_t: int
    gate_up: ProductTile
    down: ProductTile


#: (most tokens of an expert on average, tile), ascending; the last is for any number.
Table = tuple[tuple[float, Tile], ...]

ANY = float("inf")

TILES: Table = (
    (8, Tile(16, ProductTile(64, 128, 4, 4), ProductTile(64, 128, 4, 4))),
    (24, Tile(32, ProductTile(128, 64, 4, 5), ProductTile(128, 64, 4, 5))),
    (48, Tile(64, ProductTile(128, 64, 4, 4), ProductTile(128, 64, 4, 4))),
    (ANY, Tile(128, ProductTile(256, 64, 8, 4), ProductTile(256, 64, 8, 4))),
)

#: What multiprocessors older or smaller than Hopper's can hold (99 KB of shared memory).
SMALL_TILES: Table = (
    (8, Tile(16, ProductTile(64, 64, 4, 4), ProductTile(64, 64, 4, 4))),
    (24, Tile(32, ProductTile(64, 64, 4, 4), ProductTile(64, 64, 4, 4))),
    (48, Tile(64, ProductTile(64, 64, 4, 3), ProductTile(64, 64, 4, 3))),
    (ANY, Tile(128, ProductTile(128, 32, 8, 3), ProductTile(128, 32, 8, 3))),
)

#: For numbers of 4 bytes, which are multiplied outside the matrix unit.
WIDE_TILES: Table = ((ANY, Tile(16, ProductTile(64, 32, 4, 2), ProductTile(64, 32, 4, 2))),)


#: Of weights of a byte for each number: a format may have shorter steps than `block_k`.
BYTE_TILES: Table = (
    # Less than a token for an expert: there are hardly programs enough.
    (0.5, Tile(16, ProductTile(64, 128, 4, 5), ProductTile(64, 128, 4, 5))),
    (8, Tile(16, ProductTile(128, 128, 4, 4), ProductTile(64, 128, 4, 5))),
    (24, Tile(32, ProductTile(128, 128, 4, 4), ProductTile(64, 128, 4, 4))),
    (ANY, Tile(64, ProductTile(128, 128, 4, 3), ProductTile(128, 128, 4, 3))),
)

#: Of weights in lanes, whose tiles are widened in registers: steps of a block of lanes at least.
LANE_TILES: Table = (
    (0.5, Tile(16, ProductTile(64, 256, 4, 3), ProductTile(64, 256, 4, 3))),
    (8, Tile(16, ProductTile(128, 128, 4, 4), ProductTile(128, 128, 4, 4))),
    (24, Tile(32, ProductTile(128, 128, 4, 4), ProductTile(128, 128, 4, 4))),
    (48, Tile(64, ProductTile(128, 128, 4, 3), ProductTile(128, 128, 4, 3))),
    (ANY, Tile(128, ProductTile(256, 128, 8, 4), ProductTile(256, 128, 8, 4))),
)


def table_for(number_bytes: int, capability: tuple[int, int] | None, form: str = "dense") -> Table:
    """The tiles for numbers of so many bytes; capability None where kernels are interpreted.

    Args:
        number_bytes: of the model's numbers.
        capability: of the GPU.
        form: of the weights: "dense", "bytes" or "lanes", as `expert_stacks` has them.
    """
    if number_bytes == 4:
        return WIDE_TILES
    if form != "dense":
        return LANE_TILES if form == "lanes" else BYTE_TILES
    return TILES if capability is None or HOPPER <= capability < (12, 0) else SMALL_TILES


def choose_tile(table: Table, assignments: int, experts: int) -> Tile:
    """The tile for so many assignments, which are taken to spread evenly over the experts."""
    mean = assignments / experts
    return next(tile for most, tile in table if mean <= most)
