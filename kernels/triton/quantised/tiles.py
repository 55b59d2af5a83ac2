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


Tile = AddTile | MatrixTile


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
    for entry in entries:
        fields = {name: value for name, value in entry.items() if name not in ("tokens", "add")}
        parsed.append((int(entry["tokens"]), (AddTile if entry["add"] else MatrixTile)(**fields)))
    return sorted(parsed, key=lambda pair: pair[0])
