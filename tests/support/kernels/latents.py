"""Latent rows, and what attention over them is by its definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.attention.reference_attention import attend
from tokenpod.kernels.operations.attention_ops import AttentionOptions, LatentShape
from tokenpod.kernels.operations.batch import ForwardBatch

#: Rows are expanded if they have more than 32 tokens, 9, 13 or 2. Values are narrower than keys, or
#: wider.
SHAPES = {
    "large-latents": LatentShape(rank=32, rope=8, nope=16, value=16),
    "narrow-values": LatentShape(rank=24, rope=8, nope=8, value=6),
    "wide-values": LatentShape(rank=40, rope=8, nope=4, value=16),
    "small-heads": LatentShape(rank=48, rope=4, nope=2, value=2),
}


@dataclass(frozen=True)
class Latents:
    q: torch.Tensor
    pool: torch.Tensor
    up: torch.Tensor


def draw_latents(
    batch: ForwardBatch, slots: int, heads: int, shape: LatentShape, dtype: torch.dtype
) -> Latents:
    """Normal numbers where rows of the batch are, NaN in all other slots."""
    device = batch.t_slot.device
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    pool = draw(slots, 1, shape.rank + shape.rope)
    used = torch.zeros(slots, dtype=torch.bool)
    for runs in batch.b_runs:
        for start, end in runs:
            used[start:end] = True
    pool[~used] = float("nan")
    q = draw(batch.tokens, heads, shape.nope + shape.rope)
    up = draw(heads, shape.nope + shape.value, shape.rank) * shape.rank**-0.5
    return Latents(*(x.to(dtype).to(device) for x in (q, pool, up)))


def truth(latents: Latents, batch: ForwardBatch, shape: LatentShape, scale: float) -> torch.Tensor:
    """[T, H · value] float64: every head's keys and values made, row by row."""
    q, pool, up = (x.double().cpu() for x in (latents.q, latents.pool, latents.up))
    out = torch.zeros((*q.shape[:2], shape.value), dtype=torch.float64)
    for row, runs in enumerate(batch.b_runs):
        if not runs:
            continue
        seen = torch.cat([pool[start:end, 0] for start, end in runs])
        made = torch.einsum("cr,hdr->chd", seen[:, : shape.rank], up)
        key = seen[:, None, shape.rank :].expand(-1, q.shape[1], -1)
        keys = torch.cat((made[..., : shape.nope], key), dim=-1)
        tokens = slice(batch.b_start[row], batch.b_start[row + 1])
        values = made[..., shape.nope :]
        out[tokens] = attend(q[tokens], keys, values, None, AttentionOptions(scale=scale))
    return out.flatten(1)
