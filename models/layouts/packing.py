"""Numbers of a few bits in words of 32, as GPTQ, AWQ and compressed-tensors pack them.

Number i of a row begins at bit i times its bits of the row's words, lowest bits first. Word by word
that is what the packers of AutoGPTQ write (qlinear_cuda_old.py, commit 9f7d3707): its three words
of 3 bits are 32 numbers without a gap.
"""

from __future__ import annotations

import torch
from torch.nn import functional

#: Bits that numbers may have.
BITS = (2, 3, 4, 8)
#: Where a word of AutoAWQ has output 8w + i (awq/modules/linear/gemm.py, commit 88e4c76b: place i
#: has output order_map[i], order_map being 0, 2, 4, 6, 1, 3, 5, 7).
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def words(numbers: int, bits: int) -> int:
    """So many numbers take."""
    return -(-numbers * bits // 32)


def around(part: range, bits: int, numbers: int) -> tuple[range, range]:
    """The words that have the numbers `part` of a row of `numbers`, and the numbers in them.

    They begin and end at a number.
    """
    unit = 32 if bits == 3 else 32 // bits
    first, last = part.start // unit, -(-part.stop // unit)
    held = range(first * unit, min(last * unit, numbers))
    per_unit = unit * bits // 32
    return range(first * per_unit, min(last * per_unit, words(numbers, bits))), held


def unpacked(packed: torch.Tensor, bits: int, numbers: int) -> torch.Tensor:
    """Words [rows, words] int32 -> the first so many numbers of each row [rows, n] uint8."""
    # Processors that this runs on have a word's lowest byte first.
    stream = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[:, :numbers]
    if bits == 3:
        return _of_three_bits(stream)[:, :numbers]
    mask, shifts = (1 << bits) - 1, range(0, 8, bits)
    return torch.stack([stream >> shift & mask for shift in shifts], dim=2).flatten(1)[:, :numbers]


def _of_three_bits(stream: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, n] -> 8 numbers for each 3 bytes, [rows, ⌈n / 3⌉ · 8] uint8."""
    stream = functional.pad(stream, (0, -stream.shape[1] % 3))
    triples = stream.view(len(stream), -1, 3).int()
    bits = triples[:, :, 0] | triples[:, :, 1] << 8 | triples[:, :, 2] << 16
    return torch.stack([bits >> 3 * i & 7 for i in range(8)], dim=2).flatten(1).to(torch.uint8)


def unpacked_awq(packed: torch.Tensor) -> torch.Tensor:
    """Words [rows, words] int32 of 4-bit numbers in AutoAWQ's order -> [rows, 8 · words] uint8."""
    places = unpacked(packed, 4, 8 * packed.shape[1]).view(len(packed), -1, 8)
    return places[:, :, list(AWQ_PLACES)].flatten(1)
