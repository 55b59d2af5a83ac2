"""Attention of texts that a step reads as a whole, as its definition says: text by text.

In float32, or in float64 where queries, keys and values are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from tokenpod.kernels.operations.attention_ops import NEAR_AND_FAR, TextOptions, TextPlan
from tokenpod.kernels.operations.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ReferenceTexts(TextPlan):
    """The step as it came."""

    batch: ForwardBatch
    t_index: torch.Tensor


def plan_texts(batch: ForwardBatch) -> ReferenceTexts:
    """What all layers share of a step of texts."""
    tokens = batch.t_token
    return ReferenceTexts(batch, torch.arange(len(tokens), device=tokens.device))


def attend_texts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: TextPlan,
    options: TextOptions = NEAR_AND_FAR,
) -> torch.Tensor:
    """Attention of q [T, H, D] over keys and values [T, K, D] of each token's text: [T, H · D]."""
    assert isinstance(plan, ReferenceTexts)
    exact = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // keys.shape[1]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for start, end in pairwise(plan.batch.b_start):
        own, k, v = (x[start:end].to(exact) for x in (q, keys, values))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", own, k) * options.scale_of(q.shape[2])
        at = torch.arange(end - start, device=q.device)
        distance = at[:, None] - at
        if (table := options.distance_bias) is not None:
            furthest = table.shape[1] // 2
            logits = logits + table[:, distance.clamp(-furthest, furthest) + furthest]
        if options.window is not None:
            logits = logits.masked_fill(distance.abs() >= options.window, float("-inf"))
        found = torch.einsum("hqk,khd->qhd", logits.softmax(dim=-1), v)
        out[start:end] = found.to(q.dtype)
    return out.flatten(1)
