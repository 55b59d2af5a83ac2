"""Linear layers. How a weight is held and multiplied is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from tokenpod.kernels.ops import Linear, Operations


def linear(ops: Operations, weights: MutableMapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a model: its weight [out, in] and, if there is one, its bias [out].

    Both are taken out of `weights`: the layer may hold the weight in another layout, and the
    original must not live on beside it.
    """
    return ops.prepare_linear(weights.pop(name), weights.pop(f"{name}_bias", None))
