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


@dataclass(frozen=True, slots=True)
class Wave:
    """Programs of `Kind.TILED` that run at a time, as measured on an H200."""

    tile: Tile
    #: Programs that a processor holds.
    held: int
    #: Microseconds along 4,096 numbers, and where the weight has gates.
    plain: float
    gated: float


WAVES = (
    Wave(Tile(Kind.TILED, 64, 64, stages=6, block_t=64), 2, 20, 25),
    Wave(Tile(Kind.TILED, 128, 64, stages=4, block_t=64), 2, 29, 32),
    Wave(Tile(Kind.TILED, 128, 64, warps=8, stages=4, block_t=128), 1, 27, 30),
    Wave(Tile(Kind.TILED, 128, 64, warps=8, stages=4, block_t=256), 1, 46, 58),
    Wave(Tile(Kind.TILED, 256, 64, warps=8, stages=4, block_t=128), 1, 60, 50),
)

#: Programs of one tile that run at a time on the GPUs that tiles were measured on.
PROCESSORS = 132

#: Numbers of 2 bytes: those that tiles were measured for.
NUMBER_BYTES = 2

#: For few tokens, with a weight of many rows, and with one of too few for all processors.
FEW_TOKENS = 64
#: Up to here a gated product of ours takes as long as the library's, and saves a launch behind it.
FEW_GATED_TOKENS = 128
MANY_ROWS = Tile(Kind.MATRIX, 64, 128, stages=6, ahead=1024)
FEW_ROWS = Tile(Kind.TILED, 32, 128, stages=4, block_t=64)


@dataclass(frozen=True, slots=True)
class DeterministicTiles(Tiles):
    """Tiles that all add up along k in one sum: a token yields the same beside any others.

    The matrix unit adds up block after block, whatever the sides of a tile are and which factor
    comes first: on an H200 all tiles of `Kind.MATRIX` and `Kind.TILED` without splits agreed bit by
    bit, in 32 bits. So does the vendor's library for most numbers of tokens.
    """

    gated: bool
    shared_bytes: int
    #: Numbers of tokens for which the library was seen to agree.
    library: frozenset[int] = frozenset()

    def choose(self, n: int, k: int, rows: int) -> Tile:
        """What was measured for few tokens; for others what waits for the fewest waves."""
        agrees = rows in self.library
        if FEW_TOKENS // 2 < rows <= FEW_TOKENS and n < PROCESSORS * MANY_ROWS.block_n:
            return LIBRARY if agrees and not self.gated else self._that_fits(FEW_ROWS, rows)
        if rows <= FEW_TOKENS:
            known = [tile for most, tile in self.by_shape.get((n, k), []) if rows <= most]
            tile = next((tile for tile in known if tile.kind is Kind.MATRIX), MANY_ROWS)
            return self._that_fits(replace(tile, splits=1), rows)
        if agrees and (rows > FEW_GATED_TOKENS or not self.gated):
            return LIBRARY

        def microseconds(wave: Wave) -> float:
            programs = -(-rows // wave.tile.block_t) * -(-n // wave.tile.block_n)
            waves = -(-programs // (PROCESSORS * wave.held))
            return waves * (wave.gated if self.gated else wave.plain)

        return self._that_fits(min(WAVES, key=microseconds).tile, rows)

    def _that_fits(self, tile: Tile, rows: int) -> Tile:
        """With no more steps under way than a program's shared memory holds."""
        sides = (tile.block_t or max(16, 1 << (rows - 1).bit_length())) + tile.block_n
        step = sides * tile.block_k * NUMBER_BYTES
        return replace(tile, stages=max(min(tile.stages, self.shared_bytes // step), 1))


def deterministic(
    capability: tuple[int, int] | None, shared_bytes: int, *, gated: bool
) -> DeterministicTiles:
    """For a weight with gates or without, and programs with so much shared memory."""
    return DeterministicTiles(measured(capability).by_shape, [], gated, shared_bytes)


@cache
def measured(capability: tuple[int, int] | None) -> Tiles:
    """The table in product_tiles.json, a file of this package.

    They were measured on one generation of GPUs, `otherwise` over 19 shapes of seven models. Their
    tiles may ask for more memory than others have: those get `elsewhere`, which fits everywhere.
    """
    table = json.loads(files(__package__).joinpath("product_tiles.json").read_text())
    if capability == tuple(table["capability"]):
        return parse(table)
    return parse({"shapes": [], "otherwise": table["elsewhere"]})


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
