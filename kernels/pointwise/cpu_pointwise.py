"""Embedding, norms and the gated unit in as few calls as torch offers."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.operations.pointwise_ops import Activation, AddToRows
from tokenpod.kernels.pointwise import reference_pointwise as reference
from tokenpod.kernels.pointwise.reference_pointwise import ACTIVATIONS, activate, layer_norm

__all__ = ["act_mul", "activate", "embed", "layer_norm", "rms_norm"]


def embed(table: torch.Tensor, t_token: torch.Tensor, add: AddToRows | None = None) -> torch.Tensor:
    """Rows of the table [V, n] by tokens [T]: [T, n]."""
    x = table.index_select(0, t_token)
    if add is not None:
        add(x, t_token)
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x divided by the root of their mean square, times weight [n]."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, epsilon)
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation(gate) · up [T, n] of both beside each other [T, 2n]."""
    if activation not in ACTIVATIONS:
        return reference.act_mul(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
