"""Numbers of 4 bits in blocks of 32 that share a scale (OCP Microscaling Formats, 2023).

A block is 16 bytes, the first number of each byte in its low half, and a byte of its own that is
the exponent of its scale, 127 being 1.
"""

from __future__ import annotations

import torch

#: Numbers of a block, and its bytes.
BLOCK, BLOCK_BYTES = 32, 16

#: What 4 bits stand for: a sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)))


def shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor of blocks, for numbers [..., n]."""
    *others, n = shape
    return (*others, n // BLOCK, BLOCK_BYTES)


def bytes_of(numbers: int) -> int:
    """That so many take, with their scales."""
    return numbers * (BLOCK_BYTES + 1) // BLOCK


def dequantised(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Blocks [..., b, 16] and scales [..., b] uint8 -> [..., 32 · b] float32, exactly."""
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1)
    numbers = VALUES[pairs.int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)
