"""Head norms, rotation and the write to the pool: one pass from the fused product."""

from __future__ import annotations

import functools

import numpy as np
import torch

from tokenpod.kernels.attention_ops import KVScales
from tokenpod.kernels.cpu.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.cpu.compiled.loops import (
    END,
    FIRST,
    Loop,
    arguments,
    bits,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.cpu.compiled.pointwise import norm_factor
from tokenpod.kernels.cpu.rotary import refuse_scales
from tokenpod.kernels.pointwise_ops import HeadNorm
from tokenpod.kernels.reference.rotary import Rotation

_F = np.float32


def store_key_value(
    qkv: torch.Tensor,
    rotation: Rotation,
    norm: HeadNorm | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    t_slot: torch.Tensor,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """See `ops.StoreKeyValue`."""
    refuse_scales(scales)
    slots, kv_heads, head_dim = keys.shape
    tokens = len(qkv)
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype)
    weight_dtype, weights = qkv.dtype, (0, 0, 0)
    if norm is not None:
        weight_dtype = norm.query_weight.dtype
        weights = (norm.query_weight.data_ptr(), norm.key_weight.data_ptr(), bits(norm.epsilon))
    _store(qkv.dtype, rotation.cos.dtype, weight_dtype)(
        tokens,
        *(qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), t_slot.data_ptr()),
        *(rotation.cos.data_ptr(), rotation.sin.data_ptr(), *weights),
        *(tokens, heads, kv_heads, head_dim, slots),
    )
    return q


@functools.cache
def _store(dtype: torch.dtype, angle_dtype: torch.dtype, weight_dtype: torch.dtype) -> Loop:
    """The loop for heads of `dtype`."""
    kind, angle_kind, weight_kind = KINDS[dtype], KINDS[angle_dtype], KINDS[weight_dtype]
    rounds = weight_dtype == dtype

    def body(address):
        a = arguments(address)
        normed, epsilon = a[FIRST + 7] != 0, real(a, FIRST + 9)
        tokens, heads, kv_heads = a[FIRST + 10], a[FIRST + 11], a[FIRST + 12]
        head_dim, slots = a[FIRST + 13], a[FIRST + 14]
        half = head_dim // 2
        qkv = tensor(a[FIRST], (tokens, heads + 2 * kv_heads, head_dim), kind)
        q = tensor(a[FIRST + 1], (tokens, heads, head_dim), kind)
        keys = tensor(a[FIRST + 2], (slots, kv_heads, head_dim), kind)
        values = tensor(a[FIRST + 3], (slots, kv_heads, head_dim), kind)
        t_slot = integers(a[FIRST + 4], (tokens,))
        cos = tensor(a[FIRST + 5], (tokens, half), angle_kind)
        sin = tensor(a[FIRST + 6], (tokens, half), angle_kind)
        token = take(a)
        while token < a[END]:
            slot = t_slot[token]
            for h in range(heads + kv_heads):
                source = qkv[token, h]
                target = q[token, h] if h < heads else keys[slot, h - heads]
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
                for d in range(head_dim):
                    values[slot, h, d] = qkv[token, heads + kv_heads + h, d]
            token = take(a)

    return loop(body)
