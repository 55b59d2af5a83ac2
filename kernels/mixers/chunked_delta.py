"""The gated delta net by products: rows of one token together, others in chunks of their own.

Within a chunk what each token writes depends on what those before it wrote. That is a triangular
system, solved once for all of the chunk (the WY representation of Yang et al. 2024).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.convolution import (
    convolve_rows,
    convolve_run,
    convolve_seen,
    keep_run,
)
from tokenpod.kernels.mixers.reference_delta import (
    gated_norm,
    has_drafts,
    heads_of,
    log_decay,
)
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentStates,
)

#: Tokens of a chunk.
CHUNK = 64
#: Numbers of memories that rows of one token copy at a time.
AT_ONCE = 1 << 24


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: ForwardBatch,
) -> torch.Tensor:
    """Rows of one token together, others in chunks; `GatedDelta` says what."""
    mixed, gate, write, decay = inputs
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    falls, share = log_decay(decay, weights), write.float().sigmoid()
    own_inputs, beside = states.inputs.split_with_sizes(
        [shape.channels, states.inputs.shape[1] - shape.channels], dim=1
    )
    keeps, said = states.takes_back(shape.width), torch.cat([write, decay], dim=1)
    for row, state in enumerate(plan.b_row) if keeps else ():
        tokens = plan.b_start[row + 1] - plan.b_start[row]
        _catch_up(plan.b_context[row] - tokens, state, weights, shape, states)
    many = max(AT_ONCE // states.memory[0].numel(), 1)
    rows, contexts = (
        torch.tensor(each[: plan.single_rows], device=mixed.device)
        for each in (plan.b_row, plan.b_context)
    )
    for first in range(0, plan.single_rows, many):
        own = slice(first, min(first + many, plan.single_rows))
        positions = contexts[own] - 1
        made = convolve_rows(mixed[own], rows[own], positions, weights.conv, None, own_inputs)
        made = functional.silu(made).to(mixed.dtype)
        if keeps:
            beside[rows[own], :, positions % states.ring] = said[own]
        fresh = positions >= states.seen[rows[own], 0]
        # Where the memory has been through the position, nothing decays and nothing is written.
        kept, written = falls[own] * fresh[:, None], share[own] * fresh[:, None]
        out[own] = _singles(made, kept.exp(), written, rows[own], shape, states)
        states.seen[rows[own]] = positions.int()[:, None] + 1
    for row in range(plan.single_rows, plan.rows):
        own = slice(plan.b_start[row], plan.b_start[row + 1])
        state, end = plan.b_row[row], plan.b_context[row]
        made = convolve_run(mixed[own], own_inputs[state], end, weights.conv, None)
        made = functional.silu(made).to(mixed.dtype)
        if keeps:
            keep_run(said[own], beside[state], end)
        memory, drafts = states.memory[state], has_drafts(plan, row)
        if drafts:
            memory = memory.clone()
        # Where the memory has been through the position, nothing decays and nothing is written.
        known = int(states.seen[state, 0]) - (end - len(made))
        falls[own][: max(known, 0)], share[own][: max(known, 0)] = 0, 0
        out[own] = _chunks(made, falls[own], share[own], shape, memory).to(out.dtype)
        if not drafts:
            states.seen[state] = end
    return gated_norm(out, gate, weights)


def _catch_up(
    first: int,
    state: int,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
) -> None:
    """Let a memory go through the positions before `first` that it has not been through."""
    seen, width = states.known(state, first, shape.width), shape.width
    if seen >= first:
        return
    ring = states.inputs[state]
    window = ring[:, torch.arange(seen - width + 1, first, device=ring.device) % states.ring]
    made = convolve_seen(window[: shape.channels], weights.conv, None)
    made = functional.silu(made).to(ring.dtype)
    write, decay = window[shape.channels :, width - 1 :].T.chunk(2, dim=1)
    falls, share = log_decay(decay, weights), write.float().sigmoid()
    _chunks(made, falls, share, shape, states.memory[state])
    states.seen[state] = first


def _chunks(
    made: torch.Tensor,
    falls: torch.Tensor,
    share: torch.Tensor,
    shape: MemoryShape,
    memory: torch.Tensor,
) -> torch.Tensor:
    """What heads find of one row's tokens [n, H, value_dim], float32; its memory goes on."""
    q, k, v = heads_of(made, shape)
    found = []
    for at in range(0, len(made), CHUNK):
        some = slice(at, at + CHUNK)
        found.append(_chunk(q[some], k[some], v[some], falls[some], share[some], memory))
    return torch.cat(found)


def _singles(
    made: torch.Tensor,
    kept: torch.Tensor,
    share: torch.Tensor,
    rows: torch.Tensor,
    shape: MemoryShape,
    states: RecurrentStates,
) -> torch.Tensor:
    """One token of each row: [n, H, value_dim]."""
    q, k, v = heads_of(made, shape)
    memory = states.memory.index_select(0, rows).mul_(kept[:, :, None, None])
    missing = (v - torch.einsum("nhk,nhkv->nhv", k, memory)) * share[:, :, None]
    memory.addcmul_(k[:, :, :, None], missing[:, :, None])
    states.memory.index_copy_(0, rows, memory)
    return torch.einsum("nhk,nhkv->nhv", q, memory).to(made.dtype)


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    falls: torch.Tensor,
    share: torch.Tensor,
    memory: torch.Tensor,
) -> torch.Tensor:
    """[n, H, ...] of one row -> [n, H, value_dim]; the memory [H, key_dim, value_dim] goes on."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    share = share.T[:, :, None]
    # Logarithms of what is left of the memory before the chunk, and of each token's writing.
    left = falls.T.cumsum(1)
    between = left[:, :, None] - left[:, None, :]
    later = torch.ones(between.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    between = between.masked_fill(later, float("-inf")).exp()
    system = (k * share) @ k.transpose(1, 2) * between
    before = k * left.exp()[:, :, None]
    wanted = (v - before @ memory) * share
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out: torch.Tensor = (q * left.exp()[:, :, None]) @ memory + (
        q @ k.transpose(1, 2) * between
    ) @ written
    to_end = (left[:, -1:] - left).exp()[:, :, None]
    memory.mul_(left[:, -1].exp()[:, None, None]).add_((k * to_end).transpose(1, 2) @ written)
    return out.transpose(0, 1)
