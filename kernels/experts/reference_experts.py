"""Mixtures of experts, one expert after the other.

In float32, or in float64 where weights are; the sum is rounded once.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.operations.expert_ops import (
    AddExperts,
    ExpertWeights,
    Routing,
    Score,
    Shared,
    Stack,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.pointwise.reference_pointwise import act_mul, activate, rms_norm


def choose(
    logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] -> the weights of a token's experts and the experts, both [T, per_token]."""
    if routing.score is Score.SPARSEMIXER:
        weights, experts = _sparsemixer(logits, routing.tolerance)
    else:
        is_softmax = routing.score is Score.SOFTMAX
        scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
        ranking = scores if correction is None else scores + correction
        if routing.groups > 1:
            ranking = _of_best_groups(ranking, routing)
        experts = ranking.topk(routing.per_token, dim=-1).indices
        weights = scores.gather(-1, experts)
    if routing.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=routing.least_sum)
    return weights * routing.scale, experts


def _of_best_groups(ranking: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Ranking [T, E], with minus infinity for experts of groups that a token does not look at."""
    grouped = ranking.view(len(ranking), routing.groups, -1)
    score = grouped.topk(routing.group_best, dim=-1).values.sum(-1)
    best = score.topk(routing.chosen_groups, dim=-1).indices
    hidden = torch.ones_like(score, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(hidden[..., None], float("-inf")).flatten(-2)


def _sparsemixer(logits: torch.Tensor, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The two highest logits; each is weighed among those that are not far below it."""
    left, weights, experts = logits, [], []
    for _ in range(2):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().maximum(best) > tolerance
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert))
        experts.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return torch.cat(weights, -1), torch.cat(experts, -1)


def mixture(
    x: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    routing: Routing,
    inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The block's output for its normed input [T, hidden]: as large, in float32 or float64.

    Or for `inputs` [T, in], if experts read these: [T, in].
    """
    exact = torch.promote_types(weights.router.dtype, torch.float32)
    x, bias = x.to(exact), weights.router_bias
    logits = functional.linear(
        x, weights.router.to(exact), None if bias is None else bias.to(exact)
    )
    scale, chosen = choose(logits, routing, weights.correction)
    seen = x if inputs is None else inputs.to(exact)
    total = torch.zeros_like(seen)
    unit = act_mul if weights.gated else activate
    for expert in range(len(weights.router)):
        token, place = torch.nonzero(chosen == expert, as_tuple=True)
        if not len(token):
            continue
        up_bias, down_bias = (
            None if biases is None else biases[expert].to(exact)
            for biases in (weights.gate_up_bias, weights.down_bias)
        )
        inner = unit(_product(seen[token], weights.gate_up, expert, up_bias), activation)
        outer = _product(inner, weights.down, expert, down_bias)
        total[token] += scale[token, place, None] * outer
    return total


def _product(
    x: torch.Tensor, weights: Stack, expert: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """With one expert's weight."""
    if isinstance(weights, torch.Tensor):
        return functional.linear(x, weights[expert].to(x.dtype), bias)
    return weights.expert(expert).multiply(x, bias)


def prepare_experts(
    weights: ExpertWeights, norm: RowNorm | None, activation: Activation, routing: Routing
) -> AddExperts:
    """A sparse block, one expert after the other."""

    def add_experts(
        residual: torch.Tensor,
        into: torch.Tensor | None = None,
        shared: Shared | None = None,
        inputs: torch.Tensor | None = None,
    ) -> None:
        x = residual if norm is None else rms_norm(residual, norm.weight, norm.epsilon)
        made = mixture(x, weights, activation, routing, inputs)
        if shared is not None:
            made += shared.gated()
        target = residual if into is None else into
        target += made

    return add_experts
