"""The state space as its definition says: row by row, token by token, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.convolution import batch_of, convolve_token, has_drafts
from tokenpod.kernels.operations.recurrent_ops import (
    MemoryShape,
    RecurrentPlan,
    RecurrentStates,
    SpaceInputs,
    SpaceWeights,
)


def state_space(
    inputs: SpaceInputs,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """One token after the other; `StateSpace` says what."""
    mixed, gate, step = inputs
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    length = steps_of(step, weights)
    kept = falls_of(length, weights).exp()
    each = shape.value_heads // shape.key_heads
    conv = weights.conv, weights.conv_bias

    def heads(token: torch.Tensor, ring: torch.Tensor, position: int) -> list[torch.Tensor]:
        made = convolve_token(token, ring, position, *conv)
        q, k, v = parts_of(functional.silu(made).to(mixed.dtype)[None], shape)
        return [q[0].repeat_interleave(each, 0), k[0].repeat_interleave(each, 0), v[0]]

    batch = batch_of(plan)
    for row, state in enumerate(batch.b_row):
        start, end = batch.b_start[row], batch.b_start[row + 1]
        ring, memory = states.inputs[state], states.memory[state]
        first, drafts = batch.b_context[row] - (end - start), has_drafts(batch, row)
        seen, keeps = states.known(state, first, shape.width), states.takes_back(shape.width)
        own, beside = ring[: shape.channels], ring[shape.channels :]
        for position in range(seen, first) if keeps else ():
            at = position % states.ring
            _, k, v = heads(own[:, at].clone(), own, position)
            then = steps_of(beside[:, at][None], weights)
            _write(memory, k, v, falls_of(then, weights).exp()[0], then[0])
        seen = max(seen, first)
        states.seen[state] = seen
        if drafts:
            memory = memory.clone()
        for token in range(start, end):
            position = first + token - start
            q, k, v = heads(mixed[token], own, position)
            if keeps:
                beside[:, position % states.ring] = step[token]
            if position >= seen:
                _write(memory, k, v, kept[token], length[token])
            found = (q[:, :, None] * memory).sum(1) + weights.skip[:, None] * v
            out[token] = found.to(out.dtype)
        if not drafts:
            states.seen[state] = max(seen, first + end - start)
    return gated_norm(out, gate, weights)


def _write(
    memory: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Let a memory [H, key_dim, value_dim] go through a token."""
    memory *= kept[:, None, None]
    memory += k[:, :, None] * (v * length[:, None])[:, None]


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
