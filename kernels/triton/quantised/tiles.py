"""Which kernel and tile a product of fewer bits gets; benchmarks/gpu_quantised.py finds them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class AddTile:
    """How one program of `multiply_add` works."""

    #: Rows of the weight that it owns: half of them gates where there are gates.
    block_n: int
    #: Inputs that it reads at a time; all of a row where a weight has 4 bits.
    block_k: int
    warps: int = 4
    #: At most so many programs, which walk over rows where a weight has 4 bits.
    programs: int = 132 * 4


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """How one program of `matrix` works."""

    block_n: int
    #: A block of its own where a weight has 4 bits.
    block_k: int
    #: Tokens, at most.
    block_t: int = 64
    warps: int = 4
    stages: int = 3
    #: Programs that share a row along k; a gated product has rows enough, and takes it for 1.
    splits: int = 1
    #: Bytes of each row that are asked for before the input is there.
    ahead: int = 0
    #: Blocks of inputs in one turn of the loop, each of which has loads of its own in flight.
    unroll: int = 1
    #: Blocks of rows whose programs walk over tokens side by side.
    panel: int = 8


@dataclass(frozen=True, slots=True)
class StoredTile:
    """How one program of `stored_products` works, which widens the weight in registers."""

    block_n: int
    #: Inputs of a byte each that are read at a time, at most; of 4 bits the format's own.
    block_k: int
    #: Tokens, at most.
    block_t: int = 64
    warps: int = 4
    stages: int = 4
    #: Programs that share a row along k; a gated product takes it for 1.
    splits: int = 1
    #: Runs of inputs in one turn of the loop.
    unroll: int = 1
    #: Whether a group's sums get its scale, not its numbers.
    in_sums: bool = False


Tile = AddTile | MatrixTile | StoredTile


@dataclass(frozen=True, slots=True)
class Tiles:
    """By kind of weight: (most tokens, tile), ascending; beyond, the library's."""

    by_kind: dict[str, list[tuple[int, Tile]]]
    #: Where a shape was measured: (kind, n, k).
    by_shape: dict[tuple[str, int, int], list[tuple[int, Tile]]]

    def choose(self, kind: str, n: int, k: int, tokens: int) -> Tile | None:
        """For a product of so many tokens; None: one operation after the other."""
        rows = self.by_shape.get((kind, n, k)) or self.by_kind.get(kind, [])
        return next((tile for most, tile in rows if tokens <= most), None)


@cache
def measured(capability: tuple[int, int] | None) -> Tiles:
    """The table in tiles.json, a file of this package; shapes of the generation measured only."""
    table = json.loads(files(__package__).joinpath("tiles.json").read_text())
    shapes = table["shapes"] if capability == tuple(table["capability"]) else []
    return Tiles(
        {kind: _ascending(entries) for kind, entries in table["kinds"].items()},
        {(s["kind"], s["n"], s["k"]): _ascending(s["tiles"]) for s in shapes},
    )


def _ascending(entries: list[dict[str, Any]]) -> list[tuple[int, Tile]]:
    parsed: list[tuple[int, Tile]] = []
    kind: type[AddTile | MatrixTile | StoredTile]
    for entry in entries:
        named = ("tokens", "add", "stored")
        fields = {name: value for name, value in entry.items() if name not in named}
        kind = StoredTile if entry.get("stored") else AddTile if entry["add"] else MatrixTile
        parsed.append((int(entry["tokens"]), kind(**fields)))
    return sorted(parsed, key=lambda pair: pair[0])
