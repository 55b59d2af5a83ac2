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
#: Tokens with decays of each number of a key that are not cut further.
LEAST_CUT = 8
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
        kept, written = falls[own] * fresh[:, None, None], share[own] * fresh[:, None]
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
    write, decay = window[shape.channels :, width - 1 :].T.tensor_split([shape.value_heads], dim=1)
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
    memory = states.memory.index_select(0, rows).mul_(kept[:, :, :, None])
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
    q, k, v, falls = (x.transpose(0, 1) for x in (q, k, v, falls))
    share = share.T[:, :, None]
    # Logarithms of what is left of the memory before the chunk, and of each token's writing.
    left = falls.cumsum(1)
    alike_k, alike_q = _left_alike(torch.stack([k * share, q]), k, left)
    wanted = (v - (k * left.exp()) @ memory) * share
    written = torch.linalg.solve_triangular(alike_k, wanted, upper=False, unitriangular=True)
    out: torch.Tensor = (q * left.exp()) @ memory + alike_q @ written
    to_end = (left[:, -1:] - left).exp()
    memory.mul_(left[:, -1].exp()[:, :, None]).add_((k * to_end).transpose(1, 2) @ written)
    return out.transpose(0, 1)


def _left_alike(x: torch.Tensor, k: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Products of tokens [2, H, n, key_dim] and keys [H, n, key_dim], as far as these are left.

    Of `left` [H, n, decays] the logarithms fall from token to token. Returns [2, H, n, n], zero
    where the key is the later one.
    """
    n = k.shape[1]
    if left.shape[2] == 1 or n <= LEAST_CUT:
        between = left[:, :, None] - left[:, None]
        later = torch.ones((n, n), dtype=torch.bool, device=k.device).triu(1)
        between = between.masked_fill(later[:, :, None], float("-inf")).exp()
        if left.shape[2] == 1:
            return x @ k.transpose(1, 2) * between[..., 0]
        return torch.einsum("xhik,hjk,hijk->xhij", x, k, between)
    # A power of what is left of a number alone may be too large for float32, so the tokens of one
    # half and the keys of the other meet between the halves: no exponent is above 0.
    cut = n // 2
    middle = left[:, cut - 1 : cut]
    found = x.new_zeros((*x.shape[:-1], n))
    halves = slice(cut), slice(cut, n)
    for own in halves:
        found[..., own, own] = _left_alike(x[..., own, :], k[:, own], left[:, own])
    heard = x[..., cut:, :] * (left[:, cut:] - middle).exp()
    kept = k[:, :cut] * (middle - left[:, :cut]).exp()
    found[..., cut:, :cut] = heard @ kept.transpose(1, 2)
    return found
