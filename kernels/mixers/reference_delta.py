"""The gated delta net as its definition says: row by row, token by token, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.delta_ops import DeltaShape, DeltaStates, DeltaWeights

#: Added to the squares of a key's or query's numbers before their root is taken.
EPSILON = 1e-6


def gated_delta(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    batch: ForwardBatch,
) -> torch.Tensor:
    """One token after the other; see `GatedDelta`."""
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    kept = log_decay(decay, weights).exp()
    share = write.float().sigmoid()
    for row, state in enumerate(batch.b_row):
        start, end = batch.b_start[row], batch.b_start[row + 1]
        seen = torch.cat([states.inputs[state].T, mixed[start:end]])
        states.inputs[state] = seen[len(seen) - shape.width + 1 :].T
        memory = states.memory[state]
        for token in range(start, end):
            window = seen[token - start : token - start + shape.width].float()
            made = functional.silu((window.T * weights.conv.float()).sum(1)).to(mixed.dtype)
            q, k, v = heads_of(made[None], shape)
            memory *= kept[token, :, None, None]
            missing = (v[0] - (k[0, :, :, None] * memory).sum(1)) * share[token, :, None]
            memory += k[0, :, :, None] * missing[:, None]
            out[token] = (q[0, :, :, None] * memory).sum(1).to(out.dtype)
    return out


def log_decay(decay: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """[T, H] -> the logarithm of what is kept of a memory, float32."""
    return -weights.log_rate.exp() * functional.softplus(decay.float() + weights.shift)


def heads_of(
    made: torch.Tensor, shape: DeltaShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, channels] -> queries and keys [T, H, key_dim], values [T, H, value_dim], float32."""
    keys = shape.key_heads * shape.key_dim
    sizes = [keys, keys, shape.value_heads * shape.value_dim]
    q, k, v = torch.split(made.float(), sizes, dim=1)
    each = shape.value_heads // shape.key_heads
    q, k = (_unit(x.view(len(x), -1, shape.key_dim)).repeat_interleave(each, 1) for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.reshape(len(v), -1, shape.value_dim)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
