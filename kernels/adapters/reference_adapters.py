"""Low-rank adapters in plain torch: adapter by adapter, the tokens that have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenpod.kernels.operations.adapter_ops import AdapterPlan, AdapterWeights


@dataclass(frozen=True, slots=True)
class Segments(AdapterPlan):
    """Each adapter's tokens."""

    #: (slot from 0, its rank, [n] int64 tokens)
    each: list[tuple[int, int, torch.Tensor]]


def plan_adapters(t_adapter: torch.Tensor, ranks: torch.Tensor) -> Segments:
    """See `PlanAdapters`. On a GPU it waits for the device."""
    found, known = [slot for slot in torch.unique(t_adapter).tolist() if slot], ranks.tolist()
    return Segments(
        [(slot - 1, known[slot - 1], (t_adapter == slot).nonzero().squeeze(1)) for slot in found]
    )


def own_linear(
    x: torch.Tensor, weights: torch.Tensor, t_adapter: torch.Tensor, has: torch.Tensor
) -> torch.Tensor:
    """Products of x [T, in] with each token's adapter's own weight.

    On a GPU it waits for the device.
    """
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
    """Add to embeddings x [T, n] what adapters make of their rows of the table, in place.

    On a GPU it waits for the device.
    """
    inside = (t_row >= 0) & (t_row < weights.down.shape[3])
    for slot, rank in enumerate(ranks.tolist()):
        tokens = ((t_adapter == slot + 1) & inside).nonzero().flatten()
        if rank and len(tokens):
            inner = weights.down[slot, 0, :rank].index_select(1, t_row[tokens]).float()
            added = inner.t() @ weights.up[slot, :rank].float()
            x[tokens] = (x[tokens].float() + added).to(x.dtype)


def adapt(x: torch.Tensor, y: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> None:
    """Add to y [T, out] what each token's adapter makes of x [T, in], in place.

    On a GPU it waits for the device.
    """
    assert isinstance(plan, Segments)
    for slot, rank, tokens in plan.each:
        own, parts, first = x[tokens].float(), [], 0
        for part, rows in enumerate(weights.rows):
            inner = own @ weights.down[slot, part, :rank].float().t()
            up = weights.up[slot, :rank, first : first + rows].float()
            parts.append(inner.to(x.dtype).float() @ up)
            first += rows
        made = torch.cat(parts, dim=-1).add_(y[tokens])
        if weights.scale is not None and weights.scaled is not None and weights.scaled[slot]:
            made *= weights.scale[slot]
        if weights.bias is not None:
            made += weights.bias[slot]
        y[tokens] = made.to(y.dtype)
