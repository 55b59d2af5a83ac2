"""Tile sizes of the attention kernels: data, found by `benchmarks/gpu_attention.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How decode attention walks a row."""

    #: Keys and values per iteration.
    block: int
    warps: int
    #: Blocks under way, the one in use included.
    stages: int
    #: Programs to start per multiprocessor, if there are rows and blocks enough.
    programs: int


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """How extend attention cuts the square of queries and keys."""

    #: Rows of the product: (query, head of a group) pairs.
    block_m: int
    #: Keys and values per iteration.
    block_n: int
    warps: int
    stages: int


#: By bytes of one key (head size, padded to a power of two, times the bytes of a number).
DECODE_TILES = {
    128: DecodeTile(block=128, warps=4, stages=4, programs=4),
    256: DecodeTile(block=64, warps=4, stages=4, programs=4),
    512: DecodeTile(block=64, warps=4, stages=3, programs=2),
    1024: DecodeTile(block=32, warps=4, stages=2, programs=2),
}

EXTEND_TILES = {
    128: ExtendTile(block_m=128, block_n=64, warps=8, stages=3),
    256: ExtendTile(block_m=128, block_n=64, warps=8, stages=3),
    512: ExtendTile(block_m=64, block_n=32, warps=4, stages=2),
    1024: ExtendTile(block_m=32, block_n=32, warps=4, stages=2),
}


def key_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """The tables' key: what one key or value of a head occupies in a tile."""
    padded = max(64, 1 << (head_dim - 1).bit_length())
    return padded * dtype.itemsize
