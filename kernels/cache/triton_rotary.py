"""Rotary position embedding, the heads' norms and the write to the pool, in one pass.

Of few tokens, whose steps are short, every program finds the angles of its token itself. Of more,
that would be most of the work of a layer: a kernel finds them once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.attention_ops import KVScales, Rotation
from tokenpod.kernels.operations.pointwise_ops import HeadNorm

#: Heads that one program turns: few at a time as long as that gives the device more programs.
FEW_HEADS, MANY_HEADS = 2, 16
#: Tokens from which there are programs enough with many heads each.
MANY_TOKENS = 64

#: The largest number of type e4m3.
LARGEST: tl.constexpr = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Angles(Rotation):
    """Angles of the tokens of a step: what they follow from, and from MANY_TOKENS on themselves."""

    #: [T] int64, or [3, T]: then angles are there.
    t_position: torch.Tensor
    #: [D/2] float32
    inverse_frequencies: torch.Tensor
    scale: float
    #: [T, D/2] float32 each: scale · cos, scale · sin.
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None


def rotate(
    t_position: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    axes: torch.Tensor | None = None,
    *,
    one_form: bool = False,
) -> Angles:
    """Cosines and sines of positions [T] or [3, T] times frequencies [D/2].

    Sines and cosines stay float32 whatever `dtype`. If `one_form`, a kernel finds them whatever the
    number of tokens.
    """
    if t_position.dim() == 1:
        axes = None
    elif axes is None:
        t_position = t_position[0]
    tokens, half = t_position.shape[-1], len(inverse_frequencies)
    angles = Angles(t_position, inverse_frequencies, scale)
    if tokens < MANY_TOKENS and axes is None and not one_form:
        return angles
    cos = torch.empty((tokens, half), dtype=torch.float32, device=t_position.device)
    sin = torch.empty_like(cos)
    _rotate[(tokens,)](
        t_position,
        inverse_frequencies,
        axes,
        tokens,
        cos,
        sin,
        scale,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        num_warps=1,
        **launch_options(t_position.device),
    )
    return replace(angles, cos=cos, sin=sin)


def store_key_value(
    qkv: torch.Tensor,
    rotation: Rotation,
    norm: HeadNorm | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    t_slot: torch.Tensor,
    scales: KVScales | None = None,
    *,
    one_form: bool = False,
) -> torch.Tensor:
    """Queries [T, H, D], normed and turned; keys and values go to the pool at t_slot.

    Leaves `qkv` as it is. If `one_form`, programs are alike for any number of tokens.
    """
    assert isinstance(rotation, Angles)
    kv_heads, head_dim = keys.shape[1:]
    tokens, value_dim = len(qkv), values.shape[2]
    heads = (qkv.shape[1] - kv_heads * value_dim) // head_dim - kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_heads = MANY_HEADS if one_form or tokens >= MANY_TOKENS else FEW_HEADS
    _store_key_value[(tokens, triton.cdiv(heads + 2 * kv_heads, block_heads))](
        qkv,
        rotation.t_position,
        rotation.inverse_frequencies,
        rotation.scale,
        rotation.cos,
        rotation.sin,
        norm.query_weight if norm else qkv,
        norm.key_weight if norm else qkv,
        q,
        keys,
        values,
        t_slot,
        scales.keys if scales else None,
        scales.values if scales else None,
        qkv.stride(0),
        keys.stride(0),
        values.stride(0),
        norm.epsilon if norm else 0.0,
        heads,
        kv_heads,
        NORM=norm is not None,
        NORM_VALUES=norm is not None and norm.values,
        HALF=head_dim // 2,
        VALUE_HALF=value_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(max(head_dim, value_dim) // 2),
        BLOCK_HEADS=block_heads,
        num_warps=1 if block_heads == FEW_HEADS else 4,
        **launch_options(qkv.device),
    )
    return q


@launched
@triton.jit
def _rotate(
    t_position,
    inverse_frequencies,
    axes,
    tokens,
    cos,
    sin,
    scale,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)
    position = t_position + token
    if axes is not None:
        position += tl.load(axes + i, mask=i < HALF, other=0) * tokens
    c, s = angles_of(position, inverse_frequencies, scale, i, HALF)
    await_inputs(OVERLAP)
    tl.store(cos + token * HALF + i, c, mask=i < HALF)
    tl.store(sin + token * HALF + i, s, mask=i < HALF)


@triton.jit
def angles_of(position, inverse_frequencies, scale, i, HALF: tl.constexpr):
    """Scaled cosine and sine of pairs i, float32, at one position or at one for each pair."""
    frequency = tl.load(inverse_frequencies + i, mask=i < HALF, other=0.0)
    angle = tl.load(position).to(tl.float32) * frequency
    scale = tl.where(frequency == 0.0, 1.0, scale)
    return tl.cos(angle) * scale, tl.sin(angle) * scale


@launched
@triton.jit
def _store_key_value(
    qkv,
    t_position,
    inverse_frequencies,
    scale,
    cos,
    sin,
    query_weight,
    key_weight,
    q,
    keys,
    values,
    t_slot,
    key_scales,
    value_scales,
    qkv_stride,
    keys_stride,
    values_stride,
    epsilon,
    heads,
    kv_heads,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token, some of its heads in the order of the product: queries, keys, values."""
    SCALED: tl.constexpr = key_scales is not None
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    half = tl.where(is_value, VALUE_HALF, HALF)
    inside = (head < heads + 2 * kv_heads) & (i < half)
    if cos is None:
        # The product before is under way: this costs no time.
        c, s = angles_of(t_position + token, inverse_frequencies, scale, i, HALF)
    slot = tl.load(t_slot + token)
    await_inputs(OVERLAP)
    if cos is not None:
        c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)
        s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)

    own = head - heads - kv_heads
    begin = tl.minimum(head, heads + kv_heads) * (2 * HALF) + tl.maximum(own, 0) * (2 * VALUE_HALF)
    source = qkv + token * qkv_stride + begin + i
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    value_at = values + slot * values_stride + own * (2 * VALUE_HALF) + i
    is_value = is_value & inside
    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        factor = tl.rsqrt(squares[:, None] / (2 * half) + epsilon)
    low, high = first, second
    if NORM_VALUES:
        low, high = (a * factor).to(first.dtype), (b * factor).to(first.dtype)
    tl.store(value_at, _stored(low, value_scales, own, is_value, SCALED), mask=is_value)
    tl.store(
        value_at + VALUE_HALF, _stored(high, value_scales, own, is_value, SCALED), mask=is_value
    )

    if NORM:
        # Query and key heads have a weight each.
        of_query = query_weight + head * 0 + i
        of_key = key_weight + head * 0 + i
        weight_a = tl.load(of_query, mask=is_query & inside, other=0.0)
        weight_b = tl.load(of_query + HALF, mask=is_query & inside, other=0.0)
        weight_a += tl.load(of_key, mask=is_key & inside, other=0.0)
        weight_b += tl.load(of_key + HALF, mask=is_key & inside, other=0.0)
        a, b = a * factor, b * factor
        if query_weight.dtype.element_ty == first.dtype:
            # Rounded before the weight is applied, as `rms_norm` does.
            a, b = a.to(first.dtype).to(tl.float32), b.to(first.dtype).to(tl.float32)
        a, b = a * weight_a.to(tl.float32), b * weight_b.to(tl.float32)
    turned_a = (a * c - b * s).to(first.dtype)
    turned_b = (b * c + a * s).to(first.dtype)

    query_at = q + (token * heads + head) * (2 * HALF) + i
    tl.store(query_at, turned_a, mask=is_query & inside)
    tl.store(query_at + HALF, turned_b, mask=is_query & inside)
    key_at = keys + slot * keys_stride + (head - heads) * (2 * HALF) + i
    is_key = is_key & inside
    own = head - heads
    tl.store(key_at, _stored(turned_a, key_scales, own, is_key, SCALED), mask=is_key)
    tl.store(key_at + HALF, _stored(turned_b, key_scales, own, is_key, SCALED), mask=is_key)


@triton.jit
def _stored(x, scales, head, mask, SCALED: tl.constexpr):
    """X [heads, numbers] as the pool has it: with SCALED the e4m3 multiple of the head's scale.

    At most ±448 times; what is no number stays none.
    """
    if SCALED:
        scale = tl.load(scales + head + tl.zeros(mask.shape, tl.int32), mask=mask, other=1.0)
        multiple = tl.div_rn(x.to(tl.float32), scale)
        multiple = tl.where(multiple > LARGEST, LARGEST, multiple)
        x = tl.where(multiple < -LARGEST, -LARGEST, multiple).to(tl.float8e4nv)
    return x
