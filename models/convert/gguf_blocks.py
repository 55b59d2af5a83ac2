"""Numbers of GGUF's block formats, as float32. Layouts are those of ggml (ggml-common.h)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[Any]

_Q8_0 = np.dtype([("scale", "<f2"), ("q", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("q", "u1", 16)])
_Q4_K = np.dtype([("scale", "<f2"), ("least", "<f2"), ("parts", "u1", 12), ("q", "u1", 128)])
_Q6_K = np.dtype([("low", "u1", 128), ("high", "u1", 64), ("parts", "i1", 16), ("scale", "<f2")])


def _column(numbers: Blocks) -> Floats:
    """One number per block, to be multiplied with the block's numbers."""
    return numbers.astype(np.float32)[:, None]


def _q8_0(blocks: Blocks) -> Floats:
    made: Floats = blocks["q"] * _column(blocks["scale"])
    return made


def _q4_0(blocks: Blocks) -> Floats:
    """The first half of a block is in the low four bits of its bytes, the second in the high."""
    q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.int8) - 8
    return q * _column(blocks["scale"])


def _q4_k(blocks: Blocks) -> Floats:
    """Eight sub-blocks of 32; two share the bytes of their numbers, low bits and high bits.

    Each has a scale and a least value of 6 bits. Of the first four sub-blocks these are the low
    bits of bytes 0 to 3 and 4 to 7; of the others their low four bits are in bytes 8 to 11, and
    the high two bits of bytes 0 to 7 go before them.
    """
    parts = blocks["parts"]
    first, second, rest = parts[:, :4], parts[:, 4:8], parts[:, 8:]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6 << 4)], axis=1)
    least = np.concatenate([second & 63, (rest >> 4) | (second >> 6 << 4)], axis=1)
    pairs = blocks["q"].reshape(-1, 4, 1, 32)
    q = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    made: Floats = q * (_column(blocks["scale"]) * scales)[:, :, None]
    made -= (_column(blocks["least"]) * least)[:, :, None]
    return made.reshape(-1, 256)


def _q6_k(blocks: Blocks) -> Floats:
    """Two halves of 128: four runs of 32, with the low 4 bits in one array, the high 2 in another.

    Runs 0 and 1 are the low four bits of 64 bytes, 2 and 3 the high ones; run n has bits 2n and
    2n + 1 of 32 bytes. Each 16 numbers have a scale of 8 bits.
    """
    low = blocks["low"].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    high = blocks["high"].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | high << 4).astype(np.int8) - 32
    made: Floats = q.reshape(-1, 16, 16) * (_column(blocks["scale"]) * blocks["parts"])[:, :, None]
    return made.reshape(-1, 256)


@dataclass(frozen=True, slots=True)
class Format:
    """A block format.

    Attributes:
        layout: of one block.
        count: numbers in a block.
        numbers: blocks [n] to float32 [n, count].
    """

    layout: np.dtype[Any]
    count: int
    numbers: Callable[[Blocks], Floats]


FORMATS = {
    "Q8_0": Format(_Q8_0, 32, _q8_0),
    "Q4_0": Format(_Q4_0, 32, _q4_0),
    "Q4_K": Format(_Q4_K, 256, _q4_k),
    "Q6_K": Format(_Q6_K, 256, _q6_k),
}


def dequantised(data: Bytes, name: str) -> Floats:
    """Rows of blocks [rows, bytes] in the format `name` as float32 [rows, numbers]."""
    made = FORMATS[name]
    blocks = np.ascontiguousarray(data).reshape(-1).view(made.layout)
    return made.numbers(blocks).reshape(len(data), -1)
