"""The softmax that both attention kernels build up block by block, in base 2 and in float32."""

from __future__ import annotations

import triton
import triton.language as tl

#: exp(x) = exp2(x · LOG2E): the hardware has a power of two.
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)

#: The shortest inner length of a product on the matrix unit.
LEAST_DIM = 16


def head_block(head_dim: int) -> int:
    """Numbers of a head that a program has at a time, some of them beyond the head's."""
    return max(LEAST_DIM, int(triton.next_power_of_2(head_dim)))


@triton.jit
def logits_of(
    products, scale, softcap, slopes, distance, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr
):
    """Products q · k [M, N] -> what, multiplied by `base2_factor`, is the logit in base 2.

    Without options these are the products themselves, so that the scale costs nothing: it is fused
    into the exponential. `slopes` [M], `distance` [M, N] or [1, N] in positions.
    """
    if SOFTCAP:
        # tanh(x) = 2 · sigmoid(2x) - 1
        products = softcap * (2.0 * tl.sigmoid(products * (2.0 * scale / softcap)) - 1.0)
    elif ALIBI:
        products = products * scale
    if ALIBI:
        products = products - slopes[:, None] * distance
    return products


@triton.jit
def base2_factor(scale, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """What makes logits of `logits_of` those in base 2: the scale too, if they lack it."""
    if SOFTCAP or ALIBI:
        return LOG2E
    else:
        return scale * LOG2E


@triton.jit
def add_block(logits, factor, most, total, GUARDED: tl.constexpr):
    """One block's logits [M, N] into the running softmax: its maximum [M] and its sum [M].

    Returns the block's weights, the new maximum and sum, and by how much earlier sums shrink.
    GUARDED: a row of the block, and of all before it, may be hidden as a whole.
    """
    peak = tl.maximum(most, tl.max(logits, 1) * factor)
    if GUARDED:
        base = tl.where(peak == float("-inf"), 0.0, peak)
    else:
        base = peak
    weights = tl.exp2(logits * factor - base[:, None])
    shrink = tl.exp2(most - base)
    return weights, peak, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def multiplicand(query):
    """A query in the type in which it is multiplied with keys of 8 bits, which is made of those.

    Float16 holds them exactly, and a GPU makes it of them in one instruction.
    """
    if query.dtype == tl.float32:
        return query
    else:
        return query.to(tl.float16)


@triton.jit
def unpacked(pairs, dtype: tl.constexpr):
    """Two numbers of 8 bits in each int16, the first in the low half -> the first, the second.

    A matrix unit takes numbers of 16 bits that follow each other along the keys. A key's numbers
    follow each other along the head instead, and only 16 bits at a time can be turned around on
    the way: so pairs are, and then taken apart.
    """
    low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return low.to(dtype), high.to(dtype)
