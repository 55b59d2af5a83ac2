"""Which kernel and which tile a product gets: data, found by `benchmarks/run.py products`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Any


class Kind(Enum):
    """The ways to make a product."""

    #: In ordinary arithmetic; the only one that norms its input on the way.
    MULTIPLY_ADD = "multiply_add"
    #: On the matrix unit.
    MATRIX = "matrix"
    #: The same, with tokens cut into tiles too.
    TILED = "tiled"
    #: The vendor's library.
    LIBRARY = "library"


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program of a product works."""

    kind: Kind
    #: Rows of the weight that a program owns: half of them gates where there are gates.
    block_n: int = 0
    #: Their elements that it reads at a time.
    block_k: int = 0
    warps: int = 4
    #: Tiles in flight; 1 reads straight into registers.
    stages: int = 1
    #: Bytes of each row that are asked for before the input is there.
    ahead: int = 0
    #: Ask in one request a row, not a line; rows at odd addresses are asked for by lines.
    bulk: bool = False
    #: Programs that share a row of the weight, along k; their sums are added by a kernel behind.
    #: A gated product has rows enough, and `multiply_add` too: they take it for 1.
    splits: int = 1
    #: Tokens of a program of `Kind.TILED`; others have all.
    block_t: int = 0


LIBRARY = Tile(Kind.LIBRARY)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A table of tiles: by shape of the weight where it was measured, else by rows alone."""

    #: (n, k) -> (most rows, tile), ascending.
    by_shape: dict[tuple[int, int], list[tuple[int, Tile]]]
    #: (most rows, tile), ascending.
    otherwise: list[tuple[int, Tile]]

    def choose(self, n: int, k: int, rows: int) -> Tile:
        """The tile for a product of `rows` tokens with a weight [n, k]."""
        for most, tile in self.by_shape.get((n, k), self.otherwise):
            if rows <= most:
                return tile
        return LIBRARY

    def choose_own(self, n: int, k: int, rows: int) -> Tile:
        """As `choose`, but instead of the library what suits these rows of any weight.

        For work around the product that saves more than the library does.
        """
        tile = self.choose(n, k, rows)
        own = tile.kind is not Kind.LIBRARY
        return tile if own else Tiles({}, self.otherwise).choose(n, k, rows)


ALL_LIBRARY = Tiles({}, [])

#: (part of its rate that a program has beside others, tile): larger ones read less often. All of
#: them multiply by the same instruction, tokens first, and add up along k in one sum.
TILED = (
    (0.40, Tile(Kind.TILED, 32, 64, stages=6, block_t=64)),
    (0.60, Tile(Kind.TILED, 64, 64, stages=6, block_t=64)),
    (0.75, Tile(Kind.TILED, 128, 64, stages=4, block_t=64)),
    (0.88, Tile(Kind.TILED, 128, 64, stages=3, block_t=128)),
    (1.00, Tile(Kind.TILED, 256, 64, warps=8, stages=3, block_t=128)),
)

#: Programs that run at a time on the GPUs that tiles were measured on.
PROCESSORS = 132

#: Numbers of 2 bytes: those that tiles were measured for.
NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class DeterministicTiles(Tiles):
    """Of `TILED` for any number of tokens: a token yields the same beside any others."""

    tiled: tuple[tuple[float, Tile], ...]

    def choose(self, n: int, k: int, rows: int) -> Tile:
        """What keeps most programs busy."""

        def seconds(tried: tuple[float, Tile]) -> float:
            rate, tile = tried
            programs = -(-rows // tile.block_t) * -(-n // tile.block_n)
            return -(-programs // PROCESSORS) * tile.block_t * tile.block_n / rate

        return min(self.tiled, key=seconds)[1]


def deterministic(shared_bytes: int) -> DeterministicTiles:
    """For programs with so much shared memory, of which the steps under way take their part."""

    def held(tile: Tile) -> Tile:
        step = (tile.block_t + tile.block_n) * tile.block_k * NUMBER_BYTES
        return replace(tile, stages=max(min(tile.stages, shared_bytes // step), 1))

    return DeterministicTiles({}, [], tuple((rate, held(tile)) for rate, tile in TILED))


@cache
def measured(capability: tuple[int, int] | None) -> Tiles:
    """The table in product_tiles.json, a file of this package.

    Shapes were measured on one generation of GPUs. Their tiles may ask for more memory than others
    have, so those get the rules by rows alone, which fit everywhere.
    """
    table = json.loads(files(__package__).joinpath("product_tiles.json").read_text())
    return parse(table if capability == tuple(table["capability"]) else {**table, "shapes": []})


def parse(table: dict[str, Any]) -> Tiles:
    """The table of product_tiles.json."""
    by_shape = {(s["n"], s["k"]): _ascending(s["tiles"]) for s in table["shapes"]}
    return Tiles(by_shape, _ascending(table["otherwise"]))


def _ascending(entries: list[dict[str, Any]]) -> list[tuple[int, Tile]]:
    parsed = []
    for entry in entries:
        fields = {name: value for name, value in entry.items() if name not in ("rows", "kind")}
        parsed.append((int(entry["rows"]), Tile(Kind(entry["kind"]), **fields)))
    return sorted(parsed, key=lambda pair: pair[0])
