"""Attention as its definition says: row by row, gathered by slot, an explicit mask, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.engine.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The step as it came: the reference works nothing out in advance."""

    batch: ForwardBatch
    window: int | None


def plan_attention(batch: ForwardBatch, window: int | None) -> ReferencePlan:
    """See `ops.PlanAttention`."""
    return ReferencePlan(batch, window)


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: ReferencePlan
) -> torch.Tensor:
    """See `ops.Attention`."""
    batch = plan.batch
    out = torch.empty_like(q)
    for row, context in enumerate(batch.b_context):
        tokens = slice(batch.b_start[row], batch.b_start[row + 1])
        slots = batch.row_table[batch.b_row[row], :context].long()
        out[tokens] = _attend(
            q[tokens].float(), keys[slots].float(), values[slots].float(), plan.window
        ).to(q.dtype)
    return out.flatten(1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """The last len(q) positions of one row, q [n, H, D], against k and v [context, K, D]."""
    heads, context = q.shape[1], len(k)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    seen_at = torch.arange(context, device=q.device)
    asked_at = seen_at[context - len(q) :, None]
    visible = seen_at <= asked_at
    if window is not None:
        visible &= seen_at > asked_at - window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
