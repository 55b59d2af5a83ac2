"""The state space by products: rows of one token together, others in chunks of their own.

Within a chunk what tokens find of each other is masked attention without a softmax, whose weights
are decays (Dao and Gu, "Transformers are SSMs", 2024, section 6).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.chunked_delta import AT_ONCE, CHUNK
from tokenpod.kernels.mixers.convolution import (
    convolve_rows,
    convolve_run,
    convolve_seen,
    keep_run,
)
from tokenpod.kernels.mixers.reference_delta import has_drafts
from tokenpod.kernels.mixers.reference_space import falls_of, gated_norm, parts_of, steps_of
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
    """Rows of one token together, others in chunks; `StateSpace` says what."""
    mixed, gate, step = inputs
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    length = steps_of(step, weights)
    falls = falls_of(length, weights)
    own_inputs, beside = states.inputs.split_with_sizes(
        [shape.channels, states.inputs.shape[1] - shape.channels], dim=1
    )
    keeps = states.takes_back(shape.width)
    for row, state in enumerate(plan.b_row) if keeps else ():
        tokens = plan.b_start[row + 1] - plan.b_start[row]
        _catch_up(plan.b_context[row] - tokens, state, weights, shape, states)
    many = max(AT_ONCE // states.memory[0].numel(), 1)
    rows, contexts = (
        torch.tensor(each[: plan.single_rows], device=mixed.device)
        for each in (plan.b_row, plan.b_context)
    )
    conv = weights.conv, weights.conv_bias
    for first in range(0, plan.single_rows, many):
        own = slice(first, min(first + many, plan.single_rows))
        positions = contexts[own] - 1
        made = convolve_rows(mixed[own], rows[own], positions, *conv, own_inputs)
        made = functional.silu(made).to(mixed.dtype)
        if keeps:
            beside[rows[own], :, positions % states.ring] = step[own]
        fresh = (positions >= states.seen[rows[own], 0])[:, None]
        # Where the memory has been through the position, nothing decays and nothing is written.
        kept, written = (falls[own] * fresh).exp(), length[own] * fresh
        out[own] = _singles(made, kept, written, rows[own], weights, shape, states)
        states.seen[rows[own]] = positions.int()[:, None] + 1
    for row in range(plan.single_rows, plan.rows):
        own = slice(plan.b_start[row], plan.b_start[row + 1])
        state, end = plan.b_row[row], plan.b_context[row]
        made = convolve_run(mixed[own], own_inputs[state], end, *conv)
        made = functional.silu(made).to(mixed.dtype)
        if keeps:
            keep_run(step[own], beside[state], end)
        memory, drafts = states.memory[state], has_drafts(plan, row)
        if drafts:
            memory = memory.clone()
        # Where the memory has been through the position, nothing decays and nothing is written.
        known = int(states.seen[state, 0]) - (end - len(made))
        falls[own][: max(known, 0)], length[own][: max(known, 0)] = 0, 0
        found = _chunks(made, falls[own], length[own], weights, shape, memory)
        out[own] = found.to(out.dtype)
        if not drafts:
            states.seen[state] = end
    return gated_norm(out, gate, weights)


def _catch_up(
    first: int,
    state: int,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
) -> None:
    """Let a memory go through the positions before `first` that it has not been through."""
    seen, width = states.known(state, first, shape.width), shape.width
    if seen >= first:
        return
    ring = states.inputs[state]
    window = ring[:, torch.arange(seen - width + 1, first, device=ring.device) % states.ring]
    made = convolve_seen(window[: shape.channels], weights.conv, weights.conv_bias)
    made = functional.silu(made).to(ring.dtype)
    length = steps_of(window[shape.channels :, width - 1 :].T, weights)
    falls = falls_of(length, weights)
    _chunks(made, falls, length, weights, shape, states.memory[state])
    states.seen[state] = first


def _chunks(
    made: torch.Tensor,
    falls: torch.Tensor,
    length: torch.Tensor,
    weights: SpaceWeights,
    shape: MemoryShape,
    memory: torch.Tensor,
) -> torch.Tensor:
    """What heads find of one row's tokens [n, H, value_dim], float32; its memory goes on."""
    q, k, v = parts_of(made, shape)
    found = []
    for at in range(0, len(v), CHUNK):
        some = slice(at, at + CHUNK)
        written = v[some] * length[some][:, :, None]
        heard = _chunk(q[some], k[some], written, falls[some], memory)
        found.append(heard + weights.skip[:, None] * v[some])
    return torch.cat(found)


def _singles(
    made: torch.Tensor,
    kept: torch.Tensor,
    step: torch.Tensor,
    rows: torch.Tensor,
    weights: SpaceWeights,
    shape: MemoryShape,
    states: RecurrentStates,
) -> torch.Tensor:
    """One token of each row: [n, H, value_dim]."""
    q, k, v = parts_of(made, shape)
    memory = states.memory.index_select(0, rows).mul_(kept[:, :, None, None])
    # By groups of heads that share queries and keys.
    groups = memory.view(len(memory), shape.key_heads, -1, shape.key_dim, shape.value_dim)
    written = (v * step[:, :, None]).view(*groups.shape[:3], shape.value_dim)
    groups.addcmul_(k[:, :, None, :, None], written[:, :, :, None])
    states.memory.index_copy_(0, rows, memory)
    found = torch.einsum("ngk,ngmkv->ngmv", q, groups).reshape(v.shape)
    return (found + weights.skip[:, None] * v).to(made.dtype)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    written: torch.Tensor,
    falls: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """Of one row: queries and keys [n, groups, key_dim], what is written [n, H, value_dim].

    Returns what is found [n, H, value_dim]; the memory [H, key_dim, value_dim] goes on.
    """
    each = len(memory) // q.shape[1]
    q, k, written = (x.transpose(0, 1) for x in (q, k, written))
    alike = (q @ k.transpose(1, 2)).repeat_interleave(each, 0)
    q, k = (x.repeat_interleave(each, 0) for x in (q, k))
    # Logarithms of what is left of the memory before the chunk.
    left = falls.T.cumsum(1)
    between = left[:, :, None] - left[:, None, :]
    later = torch.ones(between.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, float("-inf")).exp()
    found: torch.Tensor = (q * left.exp()[:, :, None]) @ memory + (alike * between) @ written
    to_end = (left[:, -1:] - left).exp()[:, :, None]
    memory.mul_(left[:, -1].exp()[:, None, None]).add_((k * to_end).transpose(1, 2) @ written)
    return found.transpose(0, 1)
