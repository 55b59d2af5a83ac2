"""What `gpu_product_tiles` searches: kinds of weights, shapes, and the tiles that are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gpu_quantised import SHAPES

from tokenpod.kernels.triton.quantised.tiles import LaneTile, MatrixTile, Tile, TokenTile

#: By the name that the table has for it.
NAMES = {
    "int4": "int4",
    "fp8": "fp8",
    "int8": "int8",
    "groups8": "groups8",
    "mxfp4": "mxfp4",
    "table4": "nf4",
    "fp8-blocks": "fp8-blocks",
    "int8-rounded": "int8-rounded",
}
#: Whose single tokens have a kernel of their own.
OF_ONE_TOKEN = ("int4", "fp8", "int8")
LANED = ("int4", "groups8", "mxfp4", "table4")
TOKENS = (1, 16, 64)
#: Numbers of tokens whose tiles are searched, where not all are.
SOME_TOKENS = {
    "fp8": (*TOKENS, 128, 256, 4096),
    "groups8": (1, 64),
    "mxfp4": (1, 64),
    "table4": (1, 64),
    "int8-rounded": (4096,),
}
#: Shapes that are searched; others' tiles follow from these.
SEARCHED = {
    "int4": tuple(SHAPES),
    "fp8": tuple(SHAPES),
    "int8": tuple(SHAPES),
    "groups8": ("gate_up", "down"),
    "mxfp4": ("gate_up", "down"),
    "table4": ("gate_up", "down"),
    "int8-rounded": ("qkv", "output", "gate_up", "down"),
}


@dataclass(frozen=True)
class Case:
    """A kind of weight in a shape."""

    kind: str
    shape: str


def tokens_of(case: Case, among: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Numbers of tokens that are searched, or those of them that are `among`."""
    tokens = SOME_TOKENS.get(case.kind, TOKENS)
    return tokens if among is None else tuple(each for each in tokens if each in among)


def candidates(case: Case, tokens: int) -> list[Tile]:
    """Tiles to try, each once."""
    return list(dict.fromkeys(_candidates(case, tokens)))


def _candidates(case: Case, tokens: int) -> Iterator[Tile]:
    _, k, around = SHAPES[case.shape]
    gated, in_lanes = around == "gate", case.kind in LANED
    if tokens > 256:
        yield from _for_many(gated)
    elif tokens > TOKENS[-1]:
        yield from _for_hundreds(gated)
    elif tokens == 1 and case.kind in OF_ONE_TOKEN:
        yield from _tokens(k // (2 if case.kind == "int4" else 1))
    elif tokens == 1:
        yield from _lanes_for_one(k)
    elif in_lanes:
        yield from _lanes_for_some(case, tokens, gated)
    else:
        yield from _matrix_for_some(case, tokens, gated)


def _tokens(row: int) -> Iterator[Tile]:
    """For weights whose rows have so many bytes; more were slower than these."""
    ahead = 0 if row == 2048 else 2048
    yield TokenTile(8, 512, 4, ahead)
    yield TokenTile(8, 512, 4, ahead, rounds=True)
    if row == 4096:
        yield TokenTile(8, 1024, 4, rounds=True, programs=396, chunks=1)
        yield TokenTile(8, 1024, 8, rounds=True, programs=264, chunks=1)
    elif row == 2048:
        yield TokenTile(8, 512, 4, rounds=True, programs=528, chunks=1)
        yield TokenTile(16, 512, 4, rounds=True)
    else:
        yield TokenTile(16, 512, 4, rounds=True)


def _lanes_for_one(k: int) -> Iterator[Tile]:
    shapes = ((8, 8, 4), (16, 4, 4), (16, 8, 8), (32, 4, 8))
    for (block_n, parts, warps), ahead in product(shapes, (0, k)):
        yield LaneTile(block_n, parts, warps, ahead=ahead)


def _splits_of(rows: int, gated: bool, of_program: int) -> tuple[int, ...]:
    """Numbers of programs for a row that make neither far too few programs nor far too many."""
    programs = -(-rows // of_program)
    if gated:
        return (1,)
    return tuple(s for s in (1, 2, 4, 8) if 60 <= programs * s <= 600) or (1,)


def _lanes_for_some(case: Case, tokens: int, gated: bool) -> Iterator[Tile]:
    rows = SHAPES[case.shape][0] // (2 if gated else 1)
    shapes = ((64, 1, 4), (128, 1, 8), (128, 1, 4))
    if tokens == 16:
        shapes = ((64, 1, 4), (128, 1, 8), (32, 2, 4))
    for (block_n, parts, warps), lanes in product(shapes, (32, 64)):
        for splits in _splits_of(rows, gated, block_n // 2 if gated else block_n):
            for stages, ahead in ((3, 0), (4, 0), (3, 1024)) if lanes == 32 else ((3, 0),):
                yield LaneTile(block_n, parts, warps, stages, splits, lanes, ahead)


def _matrix_for_some(case: Case, tokens: int, gated: bool) -> Iterator[Tile]:
    rows = SHAPES[case.shape][0] // (2 if gated else 1)
    shapes = ((64, 1, 4), (128, 1, 8), (256, 1, 8), (128, 1, 4))
    if tokens == 16:
        shapes = ((64, 1, 4), (128, 1, 8), (32, 2, 4), (64, 2, 8), (32, 4, 8), (16, 4, 4))
    for block_n, parts, warps in shapes:
        of_each = block_n // 2 if gated else block_n
        for splits in _splits_of(rows, gated, of_each):
            for block_k, stages in ((128, 4), (128, 5), (256, 3)):
                yield MatrixTile(of_each, block_k, 64, warps, stages, parts, splits)


def _for_hundreds(gated: bool) -> Iterator[Tile]:
    """Where the library is bound neither by reading nor by arithmetic."""
    for block_n, block_t, warps in ((128, 128, 8), (128, 64, 4), (64, 128, 4), (128, 256, 8)):
        for block_k, stages in ((128, 4), (128, 3)):
            for splits in (1,) if gated else (1, 2, 4):
                of_each = block_n // 2 if gated else block_n
                yield MatrixTile(of_each, block_k, block_t, warps, stages, 1, splits)


def _for_many(gated: bool) -> Iterator[Tile]:
    """Bound by arithmetic."""
    shapes = ((128, 128, 8), (128, 256, 8), (256, 128, 8), (64, 256, 4), (128, 128, 4))
    for block_n, block_t, warps in shapes:
        for block_k, stages in ((128, 3), (128, 4), (64, 4)):
            of_each = block_n // 2 if gated else block_n
            yield MatrixTile(of_each, block_k, block_t, warps, stages)
