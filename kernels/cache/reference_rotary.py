"""Rotary position embedding (Su et al. 2021) and the write of keys and values to the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.cache.kv_rounding import store
from tokenpod.kernels.operations.attention_ops import KVScales, Rotation
from tokenpod.kernels.operations.pointwise_ops import HeadNorm
from tokenpod.kernels.pointwise.reference_pointwise import rms_norm


@dataclass(frozen=True, slots=True)
class CosSin(Rotation):
    """Cosines and sines of the angles of a step's tokens."""

    #: [T, 1, D/2]
    cos: torch.Tensor
    #: [T, 1, D/2]
    sin: torch.Tensor


def rotate(
    t_position: torch.Tensor,
    inverse_frequencies: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    axes: torch.Tensor | None = None,
) -> CosSin:
    """Cosines and sines of positions [T] or [3, T] times frequencies [D/2]."""
    if t_position.dim() == 1:
        positions = t_position.float()[:, None]
    elif axes is None:
        positions = t_position[0].float()[:, None]
    else:
        positions = t_position.float().index_select(0, axes).T.contiguous()
    angles = (positions * inverse_frequencies)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        scales = torch.where(inverse_frequencies == 0, 1.0, scale)
        cos, sin = cos * scales, sin * scales
    return CosSin(cos.to(dtype), sin.to(dtype))


def apply_rotation(x: torch.Tensor, rotation: CosSin) -> torch.Tensor:
    """X [T, heads, D] -> its pairs (i, i + D/2) turned by the token's angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotation.cos, rotation.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
    kv_heads, head_dim = keys.shape[1:]
    stored = kv_heads * head_dim, kv_heads * values.shape[2]
    q, k, v = qkv.split_with_sizes([qkv.shape[1] - sum(stored), *stored], dim=1)
    q, k = (x.view(len(x), -1, head_dim) for x in (q, k))
    v = v.view(len(v), -1, values.shape[2])
    if norm is not None:
        q = rms_norm(q, norm.query_weight, norm.epsilon)
        k = rms_norm(k, norm.key_weight, norm.epsilon)
        if norm.values:
            v = rms_norm(v, torch.ones(v.shape[2], device=v.device), norm.epsilon)
    k = apply_rotation(k, rotation)
    store(k, keys, t_slot, scales and scales.keys)
    store(v, values, t_slot, scales and scales.values)
    return apply_rotation(q, rotation)
