"""Linear layers. How a weight is held and multiplied is decided here and nowhere else.

Every function takes its weight [out, in] and, if there is one, its bias [out] out of `weights`: the
layer may hold the weight in another layout, and the original must not live on beside it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from tokenpod.kernels.ops import Activation, AddLinear, Linear, Operations, RowNorm


def linear(ops: Operations, weights: MutableMapping[str, torch.Tensor], name: str) -> Linear:
    """The layer `name` of a model."""
    return ops.prepare_linear(*_take(weights, name))


def norm_linear(
    ops: Operations,
    weights: MutableMapping[str, torch.Tensor],
    name: str,
    norm: RowNorm,
    activation: Activation | None = None,
) -> Linear:
    """The layer `name` behind `norm`; gated if there is an `activation`."""
    return ops.prepare_norm_linear(*_take(weights, name), norm, activation)


def add_linear(ops: Operations, weights: MutableMapping[str, torch.Tensor], name: str) -> AddLinear:
    """The layer `name`, added to the residual stream."""
    return ops.prepare_add_linear(*_take(weights, name))


def _take(
    weights: MutableMapping[str, torch.Tensor], name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weights.pop(name), weights.pop(f"{name}_bias", None)
