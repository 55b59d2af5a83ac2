"""Mixtures of experts on a CPU: all tokens of an expert in one product, if there are any."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from tokenpod.kernels.experts.reference_experts import choose
from tokenpod.kernels.operations.compose import product_of
from tokenpod.kernels.operations.expert_ops import (
    AddExperts,
    ExpertWeights,
    PrepareExperts,
    Routing,
    Shared,
    Stack,
)
from tokenpod.kernels.operations.ops import FormatProducts, Linear, PrepareLinear
from tokenpod.kernels.operations.pointwise_ops import (
    Activate,
    Activation,
    ActMul,
    RmsNorm,
    RowNorm,
)
from tokenpod.kernels.operations.weight import QuantisedWeight

Formats = Mapping[type[QuantisedWeight], FormatProducts]


def experts_of(
    prepare_linear: PrepareLinear,
    rms_norm: RmsNorm,
    act_mul: ActMul,
    activate: Activate,
    quantised: Formats,
) -> PrepareExperts:
    """Made of these operations."""

    def prepare(
        weights: ExpertWeights, norm: RowNorm | None, activation: Activation, routing: Routing
    ) -> AddExperts:
        router, router_bias = weights.router.float(), weights.router_bias
        gate_ups = _products(prepare_linear, quantised, weights.gate_up, weights.gate_up_bias)
        downs = _products(prepare_linear, quantised, weights.down, weights.down_bias)
        unit = act_mul if weights.gated else activate

        def add_experts(
            residual: torch.Tensor,
            into: torch.Tensor | None = None,
            shared: Shared | None = None,
            inputs: torch.Tensor | None = None,
        ) -> None:
            x = residual if norm is None else rms_norm(residual, norm.weight, norm.epsilon)
            logits = functional.linear(x.float(), router, router_bias)
            scale, chosen = choose(logits, routing, weights.correction)
            scale, chosen = scale.flatten(), chosen.flatten()
            seen = x if inputs is None else inputs
            total = torch.zeros(seen.shape)
            for picks in _by_expert(chosen, len(gate_ups)):
                expert = int(chosen[picks[0]])
                token = picks // routing.per_token
                inner = unit(gate_ups[expert](seen.index_select(0, token)), activation)
                outer = downs[expert](inner).float()
                total.index_add_(0, token, outer.mul_(scale[picks, None]))
            if shared is not None:
                total += shared.gated()
            target = residual if into is None else into
            target += total

        return add_experts

    return prepare


def _products(
    prepare_linear: PrepareLinear, quantised: Formats, weights: Stack, biases: torch.Tensor | None
) -> list[Linear]:
    """One for each expert."""
    return [
        product_of(
            prepare_linear,
            quantised,
            weights[expert] if isinstance(weights, torch.Tensor) else weights.expert(expert),
            None if biases is None else biases[expert],
        )
        for expert in range(weights.shape[0])
    ]


def _by_expert(chosen: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Which entries of `chosen` name each expert that is named."""
    order = chosen.argsort(stable=True)
    lengths = torch.bincount(chosen, minlength=count).tolist()
    return [picks for picks in torch.split(order, lengths) if len(picks)]
