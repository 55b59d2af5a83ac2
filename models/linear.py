"""Linear layers. How a weight is held and multiplied is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenpod.kernels.ops import Linear, Operations


def linear(ops: Operations, weights: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a model: its weight [out, in] and, if there is one, its bias [out]."""
    return ops.prepare_linear(weights[name], weights.get(f"{name}_bias"))
