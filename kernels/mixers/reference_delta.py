"""The gated delta net as its definition says: row by row, token by token, in float32."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.convolution import batch_of, convolve_token, has_drafts
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentPlan,
    RecurrentStates,
)
from tokenpod.kernels.pointwise.reference_pointwise import rms_norm

#: Added to the squares of a key's or query's numbers before their root is taken.
EPSILON = 1e-6


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """One token after the other; `GatedDelta` says what."""
    mixed, gate, write, decay = inputs
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    kept = log_decay(decay, weights).exp()
    share = write.float().sigmoid()
    batch = batch_of(plan)
    for row, state in enumerate(batch.b_row):
        start, end = batch.b_start[row], batch.b_start[row + 1]
        ring, memory = states.inputs[state], states.memory[state]
        first, drafts = batch.b_context[row] - (end - start), has_drafts(batch, row)
        seen, keeps = states.known(state, first, shape.width), states.takes_back(shape.width)
        own, beside = ring[: shape.channels], ring[shape.channels :]
        for position in range(seen, first) if keeps else ():
            at = position % states.ring
            made = convolve_token(own[:, at].clone(), own, position, weights.conv, None)
            _, k, v = heads_of(functional.silu(made).to(mixed.dtype)[None], shape)
            wrote, fell = beside[None, :, at].tensor_split([shape.value_heads], dim=1)
            then = log_decay(fell, weights).exp()[0], wrote.float().sigmoid()[0]
            _correct(memory, k[0], v[0], *then)
        seen = max(seen, first)
        states.seen[state] = seen
        if drafts:
            memory = memory.clone()
        for token in range(start, end):
            position = first + token - start
            made = convolve_token(mixed[token], own, position, weights.conv, None)
            if keeps:
                beside[:, position % states.ring] = torch.cat([write[token], decay[token]])
            made = functional.silu(made).to(mixed.dtype)
            q, k, v = heads_of(made[None], shape)
            if position >= seen:
                _correct(memory, k[0], v[0], kept[token], share[token])
            out[token] = (q[0, :, :, None] * memory).sum(1).to(out.dtype)
        if not drafts:
            states.seen[state] = max(seen, first + end - start)
    return gated_norm(out, gate, weights)


def _correct(
    memory: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    share: torch.Tensor,
) -> None:
    """Let a memory [H, key_dim, value_dim] go through a token that keeps [H, 1 or key_dim]."""
    memory *= kept[:, :, None]
    missing = (v - (k[:, :, None] * memory).sum(1)) * share[:, None]
    memory += k[:, :, None] * missing[:, None]


def log_decay(decay: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """[T, H · decays] -> the logarithm of what is kept of a memory [T, H, decays] float32."""
    soft = functional.softplus(decay.float() + weights.shift)
    return -weights.log_rate.exp()[:, None] * soft.view(len(decay), -1, weights.decays)


def heads_of(
    made: torch.Tensor, shape: MemoryShape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, channels] -> queries and keys [T, H, key_dim], values [T, H, value_dim], float32."""
    keys = shape.key_heads * shape.key_dim
    sizes = [keys, keys, shape.value_heads * shape.value_dim]
    q, k, v = torch.split(made.float(), sizes, dim=1)
    each = shape.value_heads // shape.key_heads
    q, k = (_unit(x.view(len(x), -1, shape.key_dim)).repeat_interleave(each, 1) for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.reshape(len(v), -1, shape.value_dim)


def gated_norm(found: torch.Tensor, gate: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
    """What heads find [T, H, value_dim], and gates [T, H · value_dim] -> [T, H · value_dim]."""
    normed = rms_norm(found, weights.norm.weight, weights.norm.epsilon).flatten(1)
    opened = gate.float().sigmoid() if weights.sigmoid_gate else functional.silu(gate.float())
    return (normed * opened).to(found.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
