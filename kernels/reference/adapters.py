"""Low-rank adapters in plain torch: adapter by adapter, the tokens that have it."""

from __future__ import annotations

import torch

from tokenpod.kernels.adapter_ops import AdapterPlan, AdapterWeights

#: (slot from 0, [n] int64 tokens) of each adapter of a step.
Segments = list[tuple[int, torch.Tensor]]


def plan_adapters(t_adapter: torch.Tensor, slots: int) -> AdapterPlan:
    """`Segments`; see `PlanAdapters`. On a GPU it waits for the device."""
    del slots
    found = [slot for slot in torch.unique(t_adapter).tolist() if slot]
    segments: Segments = [(slot - 1, (t_adapter == slot).nonzero().squeeze(1)) for slot in found]
    return segments


def adapt(x: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> torch.Tensor:
    """See `Adapt`."""
    rank, segments = weights.rank, plan
    delta = x.new_zeros(len(x), weights.up.shape[1])
    for slot, tokens in segments:
        up, parts = weights.up[slot], []
        inner = (x[tokens].float() @ weights.down[slot].float().t()).to(x.dtype)
        first = 0
        for part, rows in enumerate(weights.rows):
            seen = inner[:, part * rank : (part + 1) * rank]
            parts.append(seen.float() @ up[first : first + rows].float().t())
            first += rows
        added = torch.cat(parts, dim=-1)
        if weights.bias is not None:
            added += weights.bias[slot]
        delta[tokens] = added.to(x.dtype)
    return delta
