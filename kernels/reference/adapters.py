"""Low-rank adapters in plain torch: adapter by adapter, the tokens that have it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from tokenpod.kernels.adapter_ops import AdapterPlan, AdapterWeights


class Segment(NamedTuple):
    """An adapter of a step."""

    #: From 0.
    slot: int
    rank: int
    #: Whether outputs have scales.
    scaled: bool
    #: [n] int64: who has it.
    tokens: torch.Tensor


def plan_adapters(
    t_adapter: torch.Tensor, ranks: torch.Tensor, scaled: torch.Tensor | None = None
) -> AdapterPlan:
    """`Segment`s; see `PlanAdapters`. On a GPU it waits for the device."""
    found, known = [slot for slot in torch.unique(t_adapter).tolist() if slot], ranks.tolist()
    scales = [0] * len(known) if scaled is None else scaled.tolist()
    return [
        Segment(
            slot - 1,
            known[slot - 1],
            bool(scales[slot - 1]),
            (t_adapter == slot).nonzero().squeeze(1),
        )
        for slot in found
    ]


def own_linear(
    x: torch.Tensor, weights: torch.Tensor, t_adapter: torch.Tensor, has: torch.Tensor
) -> torch.Tensor:
    """See `OwnLinear`. On a GPU it waits for the device."""
    y = x.new_zeros(len(x), weights.shape[1])
    for slot in has.nonzero().flatten().tolist():
        tokens = (t_adapter == slot + 1).nonzero().flatten()
        if len(tokens):
            y[tokens] = functional.linear(x[tokens], weights[slot])
    return y


def adapt_rows(
    x: torch.Tensor,
    weights: AdapterWeights,
    t_row: torch.Tensor,
    t_adapter: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """See `AdaptRows`. On a GPU it waits for the device."""
    inside = (t_row >= 0) & (t_row < weights.down.shape[3])
    for slot, rank in enumerate(ranks.tolist()):
        tokens = ((t_adapter == slot + 1) & inside).nonzero().flatten()
        if rank and len(tokens):
            inner = weights.down[slot, 0, :rank].index_select(1, t_row[tokens]).float()
            added = inner.t() @ weights.up[slot, :rank].float()
            x[tokens] = (x[tokens].float() + added).to(x.dtype)


def adapt(x: torch.Tensor, y: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> None:
    """See `Adapt`. On a GPU it waits for the device."""
    segments: list[Segment] = plan
    for slot, rank, scaled, tokens in segments:
        own, parts, first = x[tokens].float(), [], 0
        for part, rows in enumerate(weights.rows):
            inner = own @ weights.down[slot, part, :rank].float().t()
            up = weights.up[slot, :rank, first : first + rows].float()
            parts.append(inner.to(x.dtype).float() @ up)
            first += rows
        made = torch.cat(parts, dim=-1).add_(y[tokens])
        if scaled and weights.scale is not None:
            made *= weights.scale[slot]
        if weights.bias is not None:
            made += weights.bias[slot]
        y[tokens] = made.to(y.dtype)
