"""Head norms, rotation and the write to the pool: one pass from the fused product."""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.kernels.cpu.compiled.loops import (
    END,
    FIRST,
    arguments,
    bits,
    floats,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.cpu.compiled.pointwise import norm_factor
from tokenpod.kernels.cpu.rotary import refuse_scales
from tokenpod.kernels.ops import HeadNorm, KVScales
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
    q = torch.empty((tokens, heads, head_dim))
    weights = (0, 0, 0)
    if norm is not None:
        weights = (norm.query_weight.data_ptr(), norm.key_weight.data_ptr(), bits(norm.epsilon))
    _store(
        tokens,
        *(qkv.data_ptr(), q.data_ptr(), keys.data_ptr(), values.data_ptr(), t_slot.data_ptr()),
        *(rotation.cos.data_ptr(), rotation.sin.data_ptr(), *weights),
        *(tokens, heads, kv_heads, head_dim, slots),
    )
    return q


@loop
def _store(address):
    a = arguments(address)
    normed, epsilon = a[FIRST + 7] != 0, real(a, FIRST + 9)
    tokens, heads, kv_heads = a[FIRST + 10], a[FIRST + 11], a[FIRST + 12]
    head_dim, slots = a[FIRST + 13], a[FIRST + 14]
    half = head_dim // 2
    qkv = floats(a[FIRST], (tokens, heads + 2 * kv_heads, head_dim))
    q = floats(a[FIRST + 1], (tokens, heads, head_dim))
    keys = floats(a[FIRST + 2], (slots, kv_heads, head_dim))
    values = floats(a[FIRST + 3], (slots, kv_heads, head_dim))
    t_slot = integers(a[FIRST + 4], (tokens,))
    cos, sin = floats(a[FIRST + 5], (tokens, half)), floats(a[FIRST + 6], (tokens, half))
    token = take(a)
    while token < a[END]:
        slot = t_slot[token]
        for h in range(heads + kv_heads):
            source = qkv[token, h]
            target = q[token, h] if h < heads else keys[slot, h - heads]
            if normed:
                weight = floats(a[FIRST + 7] if h < heads else a[FIRST + 8], (head_dim,))
                square_sum = _F(0)
                for d in range(head_dim):
                    square_sum += source[d] * source[d]
                factor = norm_factor(square_sum, head_dim, epsilon)
                for d in range(head_dim):
                    source[d] = source[d] * factor * weight[d]
            for d in range(half):
                first, second = source[d], source[d + half]
                c, s = cos[token, d], sin[token, d]
                target[d] = first * c - second * s
                target[d + half] = second * c + first * s
        for h in range(kv_heads):
            for d in range(head_dim):
                values[slot, h, d] = qkv[token, heads + kv_heads + h, d]
        token = take(a)
