"""Attention as its definition says: row by row, gathered by slot, an explicit mask.

In float32, or in float64 where queries, keys and values are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.attention_ops import (
    NO_OPTIONS,
    AttentionOptions,
    AttentionPlan,
    KVScales,
)
from tokenpod.kernels.operations.batch import ForwardBatch, is_mutual


@dataclass(frozen=True, slots=True)
class ReferencePlan(AttentionPlan):
    """The step as it came: the reference works nothing out in advance."""

    batch: ForwardBatch
    window: int | None


def plan_attention(batch: ForwardBatch, window: int | None) -> ReferencePlan:
    """What layers with this window share of a step."""
    return ReferencePlan(batch, window)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions = NO_OPTIONS,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over the pool: [T, H · V]."""
    assert isinstance(plan, ReferencePlan)
    batch = plan.batch
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty((*q.shape[:2], values.shape[2]))
    for row, context in enumerate(batch.b_context):
        tokens = slice(batch.b_start[row], batch.b_start[row + 1])
        slots = batch.row_table[batch.b_row[row], :context].long()
        if context == 0:  # padding
            out[tokens] = 0
            continue
        out[tokens] = attend(
            q[tokens].to(exact),
            _read(keys, slots, exact, scales and scales.keys),
            _read(values, slots, exact, scales and scales.values),
            plan.window,
            options,
            causal=not is_mutual(batch, row),
        ).to(q.dtype)
    return out.flatten(1)


def _read(
    pool: torch.Tensor, slots: torch.Tensor, exact: torch.dtype, scale: torch.Tensor | None
) -> torch.Tensor:
    """[slots, K, D or V]: what the pool's numbers stand for."""
    read = pool[slots].to(exact)
    if scale is None:
        return read
    return read * (scale[slots] if scale.dim() == 2 else scale)[..., None]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    options: AttentionOptions,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """The last len(q) positions of one row, q [n, H, D], against k and v [context, K, D or V]."""
    heads, context = q.shape[1], len(k)
    k = k.repeat_interleave(heads // k.shape[1], dim=1)
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * options.scale_of(q.shape[2])
    seen_at = torch.arange(context, device=q.device)
    asked_at = seen_at[context - len(q) :, None]
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    distance = asked_at - seen_at
    if options.alibi_slopes is not None:
        logits = logits - options.alibi_slopes[:, None, None] * distance.abs()
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible &= distance.abs() < window
    logits = logits.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(logits.dtype)[:, None, None].expand(-1, len(q), 1)
        logits = torch.cat([logits, sinks], dim=-1)
    weights = logits.softmax(dim=-1)[..., :context]
    return torch.einsum("hqk,khd->qhd", weights, v)
