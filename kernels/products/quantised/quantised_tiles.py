"""Which kernel and tile a product of fewer bits gets; `benchmarks/run.py products` finds them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenTile:
    """How one program of `token_product` works, which takes one token."""

    #: Rows of the weight: half of them gates where there are gates.
    block_n: int
    #: Of 4 bytes, of each row that it reads at a time: 128 for each warp, or a multiple.
    words: int
    warps: int = 4
    #: Bytes of each row that are asked for before the input is there, beyond the first ones.
    ahead: int = 0
    #: Every program norms and rounds the token; else a launch before does.
    rounds: bool = False
    #: That walk over blocks of rows, if a row has so many `words`; 0: a program for each block.
    programs: int = 0
    #: What is asked for long before the input is there: blocks behind a walking program's first
    #: one; of others, by each of the first programs, chunks (`token_inputs.CHUNK`) of the weight.
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """How one program of `matrix` works."""

    block_n: int
    block_k: int
    #: Tokens, at most.
    block_t: int = 64
    warps: int = 4
    stages: int = 3
    #: Of each row's inputs, which are rows of the tile, too.
    parts: int = 1
    #: Programs that share a row along k; a gated product has rows enough, and takes it for 1.
    splits: int = 1
    #: Blocks of rows whose programs walk over tokens side by side.
    panel: int = 8
    #: The tensor memory engine fetches both factors, where a GPU has one.
    described: bool = False


@dataclass(frozen=True, slots=True)
class LaneTile:
    """How one program of `lane_product` works."""

    #: Rows of the weight: half of them gates where there are gates.
    block_n: int
    #: Tokens. One tile is for a range of them, so that few kernels are compiled.
    block_t: int = 64
    #: Inputs of a step.
    inputs: int = 128
    #: Of each row's inputs, which are rows of the tile, too.
    parts: int = 1
    warps: int = 4
    stages: int = 3
    #: Programs that share a row along k; a gated product takes it for 1.
    splits: int = 1
    #: Bytes of each row that are asked for before the input is there.
    ahead: int = 0
    #: The tensor memory engine fetches the tokens, where a GPU has one.
    described: bool = False


Tile = TokenTile | MatrixTile | LaneTile


#: By the name that quantised_tiles.json has for them.
WAYS: dict[str, type[Tile]] = {
    "token": TokenTile,
    "matrix": MatrixTile,
    "lanes": LaneTile,
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """By kind of weight: (most tokens, tile), ascending; beyond, the library's."""

    by_kind: dict[str, list[tuple[int, Tile]]]
    #: Where a shape was measured: (kind, n, k).
    by_shape: dict[tuple[str, int, int], list[tuple[int, Tile]]]

    def choose(
        self,
        kind: str,
        n: int,
        k: int,
        tokens: int,
        *,
        but: type[Tile] | None = None,
    ) -> Tile | None:
        """For a product of so many tokens; None: one operation after the other.

        `but`: a kernel that cannot have the weight; there is another one's tile behind its own.
        """
        rows = self.by_shape.get((kind, n, k)) or self.by_kind.get(kind, [])
        fit = (tile for most, tile in rows if tokens <= most)
        return next((tile for tile in fit if but is None or not isinstance(tile, but)), None)


@cache
def measured(capability: tuple[int, int] | None) -> Tiles:
    """The table in quantised_tiles.json, beside this; shapes of the generation measured only."""
    table = json.loads(files(__package__).joinpath("quantised_tiles.json").read_text())
    return parse(table if capability == tuple(table["capability"]) else {**table, "shapes": []})


def parse(table: dict[str, Any]) -> Tiles:
    """The table of quantised_tiles.json."""
    return Tiles(
        {kind: _ascending(entries) for kind, entries in table["kinds"].items()},
        {(s["kind"], s["n"], s["k"]): _ascending(s["tiles"]) for s in table["shapes"]},
    )


def text_of(table: dict[str, Any]) -> str:
    """The same as text, a tile per line."""
    lines = ["{", f' "capability": {json.dumps(table["capability"])},', ' "kinds": {']
    kinds = [f'  "{kind}": [\n{_lines(tiles)}\n  ]' for kind, tiles in table["kinds"].items()]
    lines += [",\n".join(kinds), " },", ' "shapes": [']
    shapes = []
    for shape in table["shapes"]:
        key = json.dumps({name: shape[name] for name in ("kind", "n", "k")})
        shapes.append(f'  {key[:-1]}, "tiles": [\n{_lines(shape["tiles"])}\n  ]}}')
    return "\n".join([*lines, ",\n".join(shapes), " ]", "}", ""])


def _lines(tiles: list[dict[str, Any]]) -> str:
    return ",\n".join(f"   {json.dumps(tile)}" for tile in tiles)


def _ascending(entries: list[dict[str, Any]]) -> list[tuple[int, Tile]]:
    parsed: list[tuple[int, Tile]] = []
    for entry in entries:
        fields = {name: value for name, value in entry.items() if name not in ("tokens", "way")}
        parsed.append((int(entry["tokens"]), WAYS[entry["way"]](**fields)))
    return sorted(parsed, key=lambda pair: pair[0])
