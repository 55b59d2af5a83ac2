"""Mixtures of experts on a CPU: all tokens of an expert in one product, if there are any."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import (
    Activation,
    ActMul,
    AddExperts,
    ExpertWeights,
    PrepareExperts,
    PrepareLinear,
    RmsNorm,
    Routing,
    RowNorm,
)
from tokenpod.kernels.reference.experts import choose


def experts_of(prepare_linear: PrepareLinear, rms_norm: RmsNorm, act_mul: ActMul) -> PrepareExperts:
    """Made of these operations."""

    def prepare(
        weights: ExpertWeights, norm: RowNorm, activation: Activation, routing: Routing
    ) -> AddExperts:
        router = weights.router.float()
        gate_ups = [prepare_linear(weight, None) for weight in weights.gate_up]
        downs = [prepare_linear(weight, None) for weight in weights.down]

        def add_experts(residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
            x = rms_norm(residual, norm.weight, norm.epsilon)
            scale, chosen = choose(functional.linear(x.float(), router), routing)
            scale, chosen = scale.flatten(), chosen.flatten()
            total = torch.zeros(x.shape)
            for picks in _by_expert(chosen, len(gate_ups)):
                expert = int(chosen[picks[0]])
                token = picks // routing.per_token
                inner = act_mul(gate_ups[expert](x.index_select(0, token)), activation)
                outer = downs[expert](inner).float()
                total.index_add_(0, token, outer.mul_(scale[picks, None]))
            target = residual if into is None else into
            target += total

        return add_experts

    return prepare


def _by_expert(chosen: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Which entries of `chosen` name each expert that is named."""
    order = chosen.argsort(stable=True)
    lengths = torch.bincount(chosen, minlength=count).tolist()
    return [picks for picks in torch.split(order, lengths) if len(picks)]
