"""Scales of keys and values of 8 bits that a checkpoint brings along."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from tokenpod.kernels.cache.kv_pool import KVLayout
from tokenpod.kernels.operations.attention_ops import KVScales
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Axis, Division


def scale_names(
    spec: ModelSpec, names: Names, prefix: str, there: Container[str] = ()
) -> list[list[str]]:
    """Of the tensors with each layer's scales of keys, and of values.

    ModelOpt has them inside the products that make keys and values; `there`: the checkpoint's.
    """
    found = []
    for name in (names.key_scale, names.value_scale):
        block, _, last = name.rpartition(".")
        of_layers = [prefix + names.layer.format(i=i) for i in spec.storing]
        inside = [f"{at}{block}.{last[0]}_proj.{last}" for at in of_layers]
        found.append(inside if inside and inside[0] in there else [at + name for at in of_layers])
    return found


def read_scales(
    checkpoint: Checkpoint,
    names: list[list[str]],
    layouts: Sequence[KVLayout],
    shard: Shard,
    device: torch.device,
) -> list[KVScales] | None:
    """Each layer's, [K] float32, K this rank's heads; None if the checkpoint has none.

    Args:
        checkpoint: has one scale of keys and one of values per layer, for all heads or each.
        names: of each layer's scale of keys, and of values.
        layouts: of each layer's keys and values, of the whole model.
        shard: whose heads.
        device: where the scales go.

    Raises:
        ModelError: some layers have none, or a scale is of another shape, or no positive number.
    """
    if not any(name in checkpoint for layers in names for name in layers):
        return None
    return [
        KVScales(*(_read(checkpoint, name, layout.heads, shard).to(device) for name in pair))
        for layout, *pair in zip(layouts, *names, strict=True)
    ]


def _read(checkpoint: Checkpoint, name: str, kv_heads: int, shard: Shard) -> torch.Tensor:
    if name not in checkpoint:
        raise ModelError(f"tensor {name} is missing from the checkpoint, which has others like it")
    scale = checkpoint.read(name).float().flatten()
    if len(scale) not in (1, kv_heads):
        raise ModelError(
            f"tensor {name} has shape {list(checkpoint.shape(name))}; "
            f"expected is one number, or one for each of {kv_heads} heads"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ModelError(f"tensor {name} holds a scale that is no positive number")
    part = shard.part(Axis(kv_heads, Division.KEY))
    return scale.expand(kv_heads)[part.start : part.stop]
