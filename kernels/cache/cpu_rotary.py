"""Rotation of queries and keys together, and the write to the pool."""

from __future__ import annotations

import torch

from tokenpod.kernels.cache.kv_rounding import quantise_each
from tokenpod.kernels.cache.reference_rotary import Rotation, rotate
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.kernels.operations.pointwise_ops import HeadNorm
from tokenpod.kernels.pointwise.cpu_pointwise import rms_norm

__all__ = ["refuse_other_scales", "rotate", "store_key_value"]


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
    refuse_other_scales(keys, scales)
    _, kv_heads, head_dim = keys.shape
    tokens = qkv.shape[0]
    split = qkv.view(tokens, -1, head_dim)
    rotated = split.shape[1] - kv_heads
    heads = rotated - kv_heads
    qk, v = split[:, :rotated], split[:, rotated:]
    if norm is not None and norm.values:
        v = rms_norm(v, torch.ones(head_dim), norm.epsilon)
    if norm is not None:
        qk = torch.cat(
            (
                rms_norm(qk[:, :heads], norm.query_weight, norm.epsilon),
                rms_norm(qk[:, heads:], norm.key_weight, norm.epsilon),
            ),
            dim=1,
        )
    turned = _turn(qk, rotation)
    _store(turned[:, heads:], keys, t_slot, scales and scales.keys)
    _store(v, values, t_slot, scales and scales.values)
    return turned[:, :heads]


def refuse_other_scales(keys: torch.Tensor, scales: KVScales | None) -> None:
    """A CPU reads those of int8. The engine asks for no others. Raises NotImplementedError."""
    if scales is not None and keys.dtype != torch.int8:
        raise NotImplementedError(f"keys and values of {keys.dtype} need a GPU")


def _store(
    x: torch.Tensor, pool: torch.Tensor, t_slot: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Write x [T, K, D] to slots t_slot [T] of a pool."""
    if scale is not None:
        x, largest = quantise_each(x)
        scale.index_copy_(0, t_slot, largest)
    pool.index_copy_(0, t_slot, x)


def _turn(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """X [T, heads, D] -> a new tensor: pairs (i, i + D/2) turned by the token's angles."""
    cos, sin = rotation
    turned = torch.empty(x.shape, dtype=x.dtype)
    first, second = x.chunk(2, dim=-1)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return turned
