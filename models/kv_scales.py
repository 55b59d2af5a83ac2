"""Scales of keys and values of 8 bits that a checkpoint brings along."""

from __future__ import annotations

import torch

from tokenpod.kernels.ops import KVScales
from tokenpod.models.checkpoint import SCALES, Checkpoint
from tokenpod.models.config import DecoderConfig
from tokenpod.models.errors import ModelError
from tokenpod.models.share import Share
from tokenpod.models.weights import Dim


def read_scales(
    checkpoint: Checkpoint, config: DecoderConfig, share: Share, device: torch.device
) -> KVScales | None:
    """[layers, K] each, float32, K this rank's heads; None if the checkpoint has none.

    Args:
        checkpoint: has one scale of keys and one of values a layer, for all heads or each.
        config: of the whole model.
        share: whose heads.
        device: where the scales go.

    Raises:
        ModelError: some layers have none, or a scale is of another shape, or no positive number.
    """
    names = [[name.format(i=i) for i in range(config.layers)] for name in SCALES]
    if not any(name in checkpoint for layers in names for name in layers):
        return None
    keys, values = (
        torch.stack([_read(checkpoint, name, config, share) for name in layers]) for layers in names
    )
    return KVScales(keys.to(device), values.to(device))


def _read(checkpoint: Checkpoint, name: str, config: DecoderConfig, share: Share) -> torch.Tensor:
    if name not in checkpoint:
        raise ModelError(f"tensor {name} is missing from the checkpoint, which has others like it")
    scale = checkpoint.read(name).float().flatten()
    if len(scale) not in (1, config.kv_heads):
        raise ModelError(
            f"tensor {name} has shape {list(checkpoint.shape(name))}; "
            f"expected is one number, or one for each of {config.kv_heads} heads"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ModelError(f"tensor {name} holds a scale that is no positive number")
    part = share.part(Dim.KEY, config)
    heads = slice(part.start // config.head_dim, part.stop // config.head_dim)
    return scale.expand(config.kv_heads)[heads]
