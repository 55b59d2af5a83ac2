"""Linear layers. How a weight is held and multiplied is decided here and nowhere else.

Every function takes its weight [out, in] and, if there is one, its bias [out] out of `weights`: the
layer may hold the weight in another layout, and the original must not live on beside it.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

from tokenpod.kernels.ops import (
    Activation,
    AddBlock,
    AddLinear,
    ExpertWeights,
    Linear,
    Operations,
    Routing,
    RowNorm,
)


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


def gated_block(
    ops: Operations,
    weights: MutableMapping[str, torch.Tensor],
    gate_up_name: str,
    down_name: str,
    norm: RowNorm,
    activation: Activation,
) -> AddBlock:
    """A dense feed-forward block behind `norm`: gated, brought down and added."""
    gate_up = norm_linear(ops, weights, gate_up_name, norm, activation)
    down = add_linear(ops, weights, down_name)

    def add_gated(residual: torch.Tensor) -> None:
        down(gate_up(residual), residual)

    return add_gated


def expert_block(
    ops: Operations,
    weights: MutableMapping[str, torch.Tensor],
    name: str,
    norm: RowNorm,
    activation: Activation,
    routing: Routing,
) -> AddBlock:
    """A mixture of experts behind `norm`: the layer's router, gate_up and down under `name`."""
    parts = (weights.pop(f"{name}.{part}") for part in ExpertWeights._fields)
    return ops.prepare_experts(ExpertWeights(*parts), norm, activation, routing)


def _take(
    weights: MutableMapping[str, torch.Tensor], name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weights.pop(name), weights.pop(f"{name}_bias", None)
