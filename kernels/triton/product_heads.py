"""What a product of queries, keys and values does with its result: rotate it and store it.

Dimension i of a head is turned together with i + D/2, so a program owns rows of the weight in such
pairs, all of one head. Angles are found while the product before is still under way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.triton.rotary import angles, stored


class HeadsOut(NamedTuple):
    """Where heads go, as an argument of a kernel: see `ops.StoreKeyValue`."""

    #: [T] int64 each.
    t_position: torch.Tensor
    t_slot: torch.Tensor
    #: See `rotary.Angles`.
    inverse_frequencies: torch.Tensor
    scale: float
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    #: [slots + 1, K, D] each, and their strides by slot.
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    key_stride: int
    value_stride: int
    #: [K] float32 each, of a pool of 8 bits.
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    heads: int
    kv_heads: int


@triton.jit
def first_row(BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """The first of this program's BLOCK_N rows of the weight; HALF is 0 without heads."""
    row = tl.program_id(0) * BLOCK_N
    if HALF > 0:
        pair = tl.program_id(0) * (BLOCK_N // 2)
        row = pair // HALF * (2 * HALF) + pair % HALF
    return row


@triton.jit
def own_rows(BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    """All of them [BLOCK_N]; of heads, the two dimensions of a pair follow each other."""
    i = tl.arange(0, BLOCK_N)
    if HALF > 0:
        i = i // 2 + i % 2 * HALF
    return first_row(BLOCK_N, HALF) + i


@triton.jit
def angles_ahead(heads, token, pair, tokens, HALF: tl.constexpr):
    """Scaled cosine and sine of each token's pair, where they are not found yet; else zeros."""
    if heads.cos is None:
        known = tl.minimum(token, tokens - 1)
        c, s = angles(heads.t_position + known, heads.inverse_frequencies, heads.scale, pair, HALF)
    else:
        c = tl.zeros((1, 1), tl.float32)
        s = c
    return c, s


@triton.jit
def angles_found(heads, token, pair, tokens, c, s, HALF: tl.constexpr):
    """`angles_ahead`, or what another kernel of this step has found."""
    if heads.cos is not None:
        at = tl.minimum(token, tokens - 1) * HALF + pair
        c = tl.load(heads.cos + at)
        s = tl.load(heads.sin + at)
    return c, s


@triton.jit
def write_heads(
    heads,
    queries,
    query_stride,
    a,
    b,
    c,
    s,
    token,
    pair,
    tokens,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):
    """Dimensions `pair` and `pair + HALF` of this program's head: a and b, of each token."""
    SCALED: tl.constexpr = heads.key_scales is not None
    kind = queries.dtype.element_ty
    head = first_row(BLOCK_N, HALF) // (2 * HALF)
    kv_head = (head - heads.heads) % heads.kv_heads
    is_query = head < heads.heads
    is_value = head >= heads.heads + heads.kv_heads
    inside = token < tokens
    slot = tl.load(heads.t_slot + token, mask=inside, other=0)

    # Rounded here, as the result of a product alone would be.
    x, y = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    a = tl.where(is_value, x, x * c - y * s).to(kind)
    b = tl.where(is_value, y, y * c + x * s).to(kind)
    at = queries + token.to(tl.int64) * query_stride + head * (2 * HALF) + pair
    tl.store(at, a, mask=inside & is_query)
    tl.store(at + HALF, b, mask=inside & is_query)

    key_scale = 1.0
    value_scale = 1.0
    if SCALED:
        key_scale = tl.load(heads.key_scales + kv_head)
        value_scale = tl.load(heads.value_scales + kv_head)
    is_key = inside & (head >= heads.heads) & (head < heads.heads + heads.kv_heads)
    key_at = heads.key_pool + slot * heads.key_stride + kv_head * (2 * HALF) + pair
    tl.store(key_at, stored(a, key_scale, SCALED), mask=is_key)
    tl.store(key_at + HALF, stored(b, key_scale, SCALED), mask=is_key)
    value_at = heads.value_pool + slot * heads.value_stride + kv_head * (2 * HALF) + pair
    tl.store(value_at, stored(a, value_scale, SCALED), mask=inside & is_value)
    tl.store(value_at + HALF, stored(b, value_scale, SCALED), mask=inside & is_value)
