"""The state space as its definition says: row by row, token by token, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.convolution import convolve_token
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.recurrent_ops import (
    MemoryShape,
    RecurrentStates,
    SpaceInputs,
    SpaceWeights,
)


def state_space(
    inputs: SpaceInputs,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: ForwardBatch,
) -> torch.Tensor:
    """One token after the other; `StateSpace` says what."""
    mixed, gate, step = inputs
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    length = steps_of(step, weights)
    kept = falls_of(length, weights).exp()
    each = shape.value_heads // shape.key_heads
    for row, state in enumerate(plan.b_row):
        start, end = plan.b_start[row], plan.b_start[row + 1]
        ring, memory = states.inputs[state], states.memory[state]
        for token in range(start, end):
            position = plan.b_context[row] - (end - token)
            made = convolve_token(mixed[token], ring, position, weights.conv, weights.conv_bias)
            q, k, v = parts_of(functional.silu(made).to(mixed.dtype)[None], shape)
            q, k = (x[0].repeat_interleave(each, 0) for x in (q, k))
            if position >= states.seen[state, 0]:
                memory *= kept[token, :, None, None]
                memory += k[:, :, None] * (v[0] * length[token, :, None])[:, None]
                states.seen[state] = position + 1
            found = (q[:, :, None] * memory).sum(1) + weights.skip[:, None] * v[0]
            out[token] = found.to(out.dtype)
    return gated_norm(out, gate, weights)


def steps_of(step: torch.Tensor, weights: SpaceWeights) -> torch.Tensor:
    """[T, H] -> how long each token's step is, float32."""
    return functional.softplus(step.float() + weights.shift)


def falls_of(length: torch.Tensor, weights: SpaceWeights) -> torch.Tensor:
    """[T, H] -> the logarithm of what is kept of a memory over such a step."""
    return -weights.log_rate.exp() * length


def parts_of(
    made: torch.Tensor, shape: MemoryShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, channels] -> queries and keys [T, groups, key_dim], values [T, H, value_dim], float32."""
    keys = shape.key_heads * shape.key_dim
    q, k, v = torch.split(made.float(), [keys, keys, shape.values], dim=1)
    q, k = (x.reshape(len(x), shape.key_heads, shape.key_dim) for x in (q, k))
    return q, k, v.reshape(len(v), shape.value_heads, shape.value_dim)


def gated_norm(found: torch.Tensor, gate: torch.Tensor, weights: SpaceWeights) -> torch.Tensor:
    """What heads find [T, H, value_dim], and gates [T, H · value_dim] -> [T, H · value_dim]."""
    wide, opened = found.flatten(1).float(), functional.silu(gate.float())
    if weights.norm is None:
        return (wide * opened).to(found.dtype)
    if not weights.norm_first:
        wide = wide * opened
    parts = wide.view(len(wide), weights.norm_groups, -1)
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + weights.norm.epsilon)
    normed = (parts * scale).flatten(1).to(found.dtype) * weights.norm.weight
    return (normed.float() * opened).to(found.dtype) if weights.norm_first else normed
