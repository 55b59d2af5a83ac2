"""Mixtures of experts, one expert after the other.

In float32, or in float64 where weights are; the sum is rounded once.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Activation, AddExperts, ExpertWeights, Routing, RowNorm
from tokenpod.kernels.reference.pointwise import act_mul, rms_norm


def choose(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> the weights of a token's experts and the experts, both [T, per_token]."""
    weights, experts = logits.softmax(-1).topk(routing.per_token, dim=-1)
    if routing.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def mixture(
    x: torch.Tensor, weights: ExpertWeights, activation: Activation, routing: Routing
) -> torch.Tensor:
    """The block's output for its normed input [T, hidden]: [T, hidden] in float32 or float64."""
    exact = torch.promote_types(weights.router.dtype, torch.float32)
    x = x.to(exact)
    scale, chosen = choose(functional.linear(x, weights.router.to(exact)), routing)
    total = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
        token, place = torch.nonzero(chosen == expert, as_tuple=True)
        inner = act_mul(functional.linear(x[token], gate_up.to(exact)), activation)
        total[token] += scale[token, place, None] * functional.linear(inner, down.to(exact))
    return total


def prepare_experts(
    weights: ExpertWeights, norm: RowNorm, activation: Activation, routing: Routing
) -> AddExperts:
    """See `ops.PrepareExperts`."""

    def add_experts(residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
        x = rms_norm(residual, norm.weight, norm.epsilon)
        target = residual if into is None else into
        target += mixture(x, weights, activation, routing)

    return add_experts
