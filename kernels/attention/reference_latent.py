"""Latent rows: their norm, the rotation of the key that heads share, and the write to the pool."""

from __future__ import annotations

import torch

from tokenpod.kernels.cache.reference_rotary import CosSin, apply_rotation
from tokenpod.kernels.operations.attention_ops import Rotation
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.pointwise.reference_pointwise import rms_norm


def store_latent(
    q: torch.Tensor,
    row: torch.Tensor,
    rotation: Rotation,
    norm: RowNorm,
    pool: torch.Tensor,
    t_slot: torch.Tensor,
) -> torch.Tensor:
    """Queries [T, H, nope + rope] with turned ends.

    Latent rows go to the pool, normed and turned.
    """
    assert isinstance(rotation, CosSin)
    rank = len(norm.weight)
    rope = row.shape[1] - rank
    key = apply_rotation(row[:, None, rank:], rotation)[:, 0]
    latent = rms_norm(row[:, :rank], norm.weight, norm.epsilon)
    pool[t_slot, 0] = torch.cat((latent, key), dim=-1)
    return torch.cat((q[..., :-rope], apply_rotation(q[..., -rope:], rotation)), dim=-1)
