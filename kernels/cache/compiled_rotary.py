"""Angles of positions; head norms, rotation and the write to the pool in one pass."""

from __future__ import annotations

import functools

import numpy as np
import torch

from tokenpod.kernels.cache import reference_rotary as reference
from tokenpod.kernels.cache.kv_rounding import LEAST_LARGEST, refuse_other_scales
from tokenpod.kernels.cache.reference_rotary import CosSin
from tokenpod.kernels.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    Loop,
    arguments,
    bits,
    floats,
    inlined,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.operations.attention_ops import KVScales, Rotation
from tokenpod.kernels.operations.pointwise_ops import HeadNorm
from tokenpod.kernels.pointwise.compiled_pointwise import norm_factor

_F = np.float32
_LEAST, _ONE_PART = _F(LEAST_LARGEST), _F(1 / 127)


def rotate(
    t_position: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    axes: torch.Tensor | None = None,
) -> CosSin:
    """Cosines and sines of positions [T] or [3, T] times frequencies [D/2]."""
    if t_position.dim() > 1:
        if axes is not None:
            return reference.rotate(t_position, inverse_frequencies, scale, dtype, axes)
        t_position = t_position[0]
    t_position, tokens, half = t_position.contiguous(), len(t_position), len(inverse_frequencies)
    assert t_position.dtype is torch.int64, t_position.dtype
    cos, sin = (torch.empty((tokens, 1, half), dtype=dtype) for _ in range(2))
    _rotate(dtype)(
        tokens,
        *(t_position.data_ptr(), inverse_frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(tokens, half, bits(scale)),
    )
    return CosSin(cos, sin)


def store_key_value(
    qkv: torch.Tensor,
    rotation: Rotation,
    norm: HeadNorm | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    t_slot: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Queries [T, H, D], normed and turned; keys and values go to the pool at t_slot."""
    assert isinstance(rotation, CosSin)
    refuse_other_scales(keys, scales)
    slots, kv_heads, head_dim = keys.shape
    tokens, value_dim = len(qkv), values.shape[2]
    heads = (qkv.shape[1] - kv_heads * value_dim) // head_dim - kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype)
    weight_dtype, weights = qkv.dtype, (0, 0, 0)
    if norm is not None:
        weight_dtype = norm.query_weight.dtype
        weights = (norm.query_weight.data_ptr(), norm.key_weight.data_ptr(), bits(norm.epsilon))
    norms_values = norm is not None and norm.values
    _store(qkv.dtype, rotation.cos.dtype, weight_dtype, scales is not None, norms_values)(
        tokens,
        *(qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), t_slot.data_ptr()),
        *(rotation.cos.data_ptr(), rotation.sin.data_ptr(), *weights),
        *(tokens, heads, kv_heads, head_dim, value_dim, slots),
        *(scale.data_ptr() for scale in scales or ()),
    )
    return q


@inlined()
def quantise(source, numbers, scales, slot, head):
    """Write a head's numbers to a pool of int8; see `kv_rounding.quantise_each`."""
    largest, nothing = _F(0), _F(0)
    for d in range(len(source)):
        x = wide(source[d])
        largest = max(largest, abs(x))
        nothing += x * _F(0)  # NaN if a number is not finite, which a comparison may not show
    inverse = _F(127) / largest if largest > _LEAST else _F(0)
    for d in range(len(source)):
        x = np.rint(wide(source[d]) * inverse)
        x = x if x > _F(-127) else _F(-127)
        numbers[slot, head, d] = np.int8(x if x < _F(127) else _F(127))
    scales[slot, head] = largest * _ONE_PART + nothing


@functools.cache
def _rotate(dtype: torch.dtype) -> Loop:
    """The loop for cosines and sines of `dtype`."""
    kind = KINDS[dtype]

    def body(address):
        a = arguments(address)
        tokens, half, scale = a[FIRST + 4], a[FIRST + 5], real(a, FIRST + 6)
        t_position = integers(a[FIRST], (tokens,))
        frequencies = floats(a[FIRST + 1], (half,))
        cos = tensor(a[FIRST + 2], (tokens, half), kind)
        sin = tensor(a[FIRST + 3], (tokens, half), kind)
        token = take(a)
        while token < a[END]:
            position = _F(t_position[token])
            for d in range(half):
                angle = position * frequencies[d]
                # Pairs that are not turned keep their length.
                length = _F(1) if frequencies[d] == _F(0) else scale
                cos[token, d] = narrow(np.cos(angle) * length, kind)
                sin[token, d] = narrow(np.sin(angle) * length, kind)
            token = take(a)

    return loop(body)


@functools.cache
def _store(
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    scaled: bool,
    norms_values: bool,
) -> Loop:
    """The loop for heads of `dtype`; `scaled`: into a pool of int8; `HeadNorm.values` or not."""
    pool_kind = KINDS[torch.int8 if scaled else dtype]
    kind, angle_kind, weight_kind = KINDS[dtype], KINDS[angle_dtype], KINDS[weight_dtype]
    rounds = weight_dtype == dtype

    def body(address):
        a = arguments(address)
        normed, epsilon = a[FIRST + 7] != 0, real(a, FIRST + 9)
        tokens, heads, kv_heads = a[FIRST + 10], a[FIRST + 11], a[FIRST + 12]
        head_dim, value_dim, slots = a[FIRST + 13], a[FIRST + 14], a[FIRST + 15]
        half, before = head_dim // 2, (heads + kv_heads) * head_dim
        qkv = tensor(a[FIRST], (tokens, before + kv_heads * value_dim), kind)
        q = tensor(a[FIRST + 1], (tokens, heads, head_dim), kind)
        keys = tensor(a[FIRST + 2], (slots, kv_heads, head_dim), pool_kind)
        values = tensor(a[FIRST + 3], (slots, kv_heads, value_dim), pool_kind)
        key_scales = floats(a[FIRST + 16], (slots, kv_heads))
        value_scales = floats(a[FIRST + 17], (slots, kv_heads))
        t_slot = integers(a[FIRST + 4], (tokens,))
        cos = tensor(a[FIRST + 5], (tokens, half), angle_kind)
        sin = tensor(a[FIRST + 6], (tokens, half), angle_kind)
        turned = np.empty((kv_heads, head_dim), kind)
        token = take(a)
        while token < a[END]:
            slot = t_slot[token]
            for h in range(heads + kv_heads):
                source = qkv[token, h * head_dim : (h + 1) * head_dim]
                target = q[token, h] if h < heads else turned[h - heads]
                if normed:
                    at = a[FIRST + 7] if h < heads else a[FIRST + 8]
                    weight = tensor(at, (head_dim,), weight_kind)
                    square_sum = _F(0)
                    for d in range(head_dim):
                        square_sum += wide(source[d]) * wide(source[d])
                    factor = norm_factor(square_sum, head_dim, epsilon)
                    for d in range(head_dim):
                        y = wide(source[d]) * factor
                        if rounds:
                            y = wide(narrow(y, kind))
                        source[d] = narrow(y * wide(weight[d]), kind)
                for d in range(half):
                    first, second = wide(source[d]), wide(source[d + half])
                    c, s = wide(cos[token, d]), wide(sin[token, d])
                    target[d] = narrow(first * c - second * s, kind)
                    target[d + half] = narrow(second * c + first * s, kind)
            for h in range(kv_heads):
                at_value = before + h * value_dim
                key, value = turned[h], qkv[token, at_value : at_value + value_dim]
                if norms_values:
                    square_sum = _F(0)
                    for d in range(value_dim):
                        square_sum += wide(value[d]) * wide(value[d])
                    factor = norm_factor(square_sum, value_dim, epsilon)
                    for d in range(value_dim):
                        value[d] = narrow(wide(value[d]) * factor, kind)
                if scaled:
                    quantise(key, keys, key_scales, slot, h)
                    quantise(value, values, value_scales, slot, h)
                else:
                    for d in range(head_dim):
                        keys[slot, h, d] = key[d]
                    for d in range(value_dim):
                        values[slot, h, d] = value[d]
            token = take(a)

    return loop(body)
