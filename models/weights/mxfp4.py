"""Numbers of 4 bits in blocks of 32 that share a scale (OCP Microscaling Formats, 2023).

A block is 16 bytes, the first number of each byte in its low half, and a byte of its own that is
the exponent of its scale, 127 being 1.
"""

from __future__ import annotations

from math import gcd

import torch

from tokenpod.kernels.products.formats.grouped import GroupedWeight

#: Numbers of a block, and its bytes.
BLOCK, BLOCK_BYTES = 32, 16

#: What 4 bits stand for: a sign, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)))


def shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the tensor of blocks, for numbers [..., n]."""
    *others, n = shape
    return (*others, n // BLOCK, BLOCK_BYTES)


def bytes_of(outputs: range, inputs: range) -> int:
    """That these outputs and inputs take with their scales; a block that is cut narrows all."""
    block = gcd(BLOCK, inputs.start)
    return len(outputs) * (-(-len(inputs) // 2) + -(-len(inputs) // block))


def shared_bytes(inputs: range) -> int:
    """That a weight takes once: the block of each input, and what 4 bits stand for."""
    return 4 * len(inputs) + VALUES.nbytes


def weight_of(blocks: torch.Tensor, scales: torch.Tensor) -> GroupedWeight:
    """Blocks [out, b, 16] and scales [out, b] uint8 -> a weight [out, 32 · b], as stored."""
    device = blocks.device
    index = torch.arange(scales.shape[1] * BLOCK, device=device) // BLOCK
    return GroupedWeight(blocks.flatten(1), scales, index.to(torch.int32), table=VALUES.to(device))
