"""The highest of many keys, without sorting them: a border is moved until so many are above it.

A step of the loop compares and counts. A sort in registers is hundreds of instructions for each of
a thread's keys, and takes seconds to compile.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Above every key.
_ABOVE = tl.constexpr(1 << 62)


@triton.jit
def rising_bits(x):
    """Int32 that rise as float32 numbers do; -0 is 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def of_rising(bits):
    """The float32 of which these are the rising bits."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def border_of(keys, there, k):
    """Int64: a border that the `k` highest keys reach, and no others but what ties with the last.

    Where there are fewer than `k`, all reach it.

    Args:
        keys: [n] int64, from -2^61 to below 2^61.
        there: [n]; which of them count.
        k: at least 1.
    """
    low = tl.min(tl.where(there, keys, _ABOVE), axis=0)
    high = tl.max(tl.where(there, keys, -_ABOVE), axis=0) + 1
    reaching = tl.sum(there.to(tl.int32), axis=0)
    while (reaching > k) & (high - low > 1):
        middle = low + ((high - low) >> 1)
        count = tl.sum((there & (keys >= middle)).to(tl.int32), axis=0)
        enough = count >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reaching = tl.where(enough, count, reaching)
    return low


@triton.jit
def highest(keys, there, k):
    """The `k`-th highest key; there are at least so many."""
    border = border_of(keys, there, k)
    return tl.min(tl.where(there & (keys >= border), keys, _ABOVE), axis=0)
