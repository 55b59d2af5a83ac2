"""Rotation of queries and keys together, and the write to the pool."""

from __future__ import annotations

import torch

from tokenpod.kernels.attention_ops import KVScales
from tokenpod.kernels.cpu.pointwise import rms_norm
from tokenpod.kernels.pointwise_ops import HeadNorm
from tokenpod.kernels.reference.rotary import Rotation, rotate

__all__ = ["refuse_scales", "rotate", "store_key_value"]


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
    _, kv_heads, head_dim = keys.shape
    tokens = qkv.shape[0]
    split = qkv.view(tokens, -1, head_dim)
    rotated = split.shape[1] - kv_heads
    heads = rotated - kv_heads
    qk = split[:, :rotated]
    if norm is not None:
        qk = torch.cat(
            (
                rms_norm(qk[:, :heads], norm.query_weight, norm.epsilon),
                rms_norm(qk[:, heads:], norm.key_weight, norm.epsilon),
            ),
            dim=1,
        )
    turned = _turn(qk, rotation)
    keys.index_copy_(0, t_slot, turned[:, heads:])
    values.index_copy_(0, t_slot, split[:, rotated:])
    return turned[:, :heads]


def refuse_scales(scales: KVScales | None) -> None:
    """The engine asks for none on a CPU. Raises NotImplementedError."""
    if scales is not None:
        raise NotImplementedError("keys and values of 8 bits need a GPU")


def _turn(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """X [T, heads, D] -> a new tensor: pairs (i, i + D/2) turned by the token's angles."""
    cos, sin = rotation
    turned = torch.empty(x.shape, dtype=x.dtype)
    first, second = x.chunk(2, dim=-1)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
    return turned
