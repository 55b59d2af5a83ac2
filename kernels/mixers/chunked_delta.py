"""The gated delta net by products: rows of one token together, others in chunks of their own.

Within a chunk what each token writes depends on what those before it wrote. That is a triangular
system, solved once for all of the chunk (the WY representation of Yang et al. 2024).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.mixers.reference_delta import heads_of, log_decay
from tokenpod.kernels.operations.batch import ForwardBatch
from tokenpod.kernels.operations.delta_ops import DeltaShape, DeltaStates, DeltaWeights

#: Tokens of a chunk.
CHUNK = 64
#: Numbers of memories that rows of one token copy at a time.
AT_ONCE = 1 << 24


def gated_delta(
    mixed: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
    batch: ForwardBatch,
) -> torch.Tensor:
    """What the rows of a step read of their states, which they write: [T, heads · value_dim]."""
    out = mixed.new_empty((len(mixed), shape.value_heads, shape.value_dim))
    falls, share = log_decay(decay, weights), write.float().sigmoid()
    many = max(AT_ONCE // states.memory[0].numel(), 1)
    rows = torch.tensor(batch.b_row[: batch.single_rows], device=mixed.device)
    for first in range(0, batch.single_rows, many):
        own = slice(first, min(first + many, batch.single_rows))
        made = _steps(mixed[own], rows[own], weights, shape, states)
        out[own] = _singles(made, falls[own].exp(), share[own], rows[own], shape, states)
    for row in range(batch.single_rows, batch.rows):
        own = slice(batch.b_start[row], batch.b_start[row + 1])
        state = batch.b_row[row]
        made = _run(mixed[own], state, weights, shape, states)
        q, k, v = heads_of(made, shape)
        memory = states.memory[state]
        found = []
        for at in range(0, len(made), CHUNK):
            some = slice(at, at + CHUNK)
            part = (q[some], k[some], v[some], falls[own][some], share[own][some])
            found.append(_chunk(*part, memory))
        out[own] = torch.cat(found).to(out.dtype)
    return out


def _steps(
    mixed: torch.Tensor,
    rows: torch.Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
) -> torch.Tensor:
    """The convolution of one token of each row: [n, channels]."""
    seen = torch.cat([states.inputs.index_select(0, rows), mixed[:, :, None]], dim=2)
    states.inputs.index_copy_(0, rows, seen[:, :, 1:])
    return functional.silu((seen.float() * weights.conv.float()).sum(2)).to(mixed.dtype)


def _run(
    mixed: torch.Tensor,
    state: int,
    weights: DeltaWeights,
    shape: DeltaShape,
    states: DeltaStates,
) -> torch.Tensor:
    """The convolution of one row's tokens: [n, channels]."""
    seen = torch.cat([states.inputs[state], mixed.T], dim=1)
    states.inputs[state] = seen[:, seen.shape[1] - shape.width + 1 :]
    windows = seen.float().unfold(1, shape.width, 1)
    return functional.silu(torch.einsum("ctw,cw->tc", windows, weights.conv.float())).to(
        mixed.dtype
    )


def _singles(
    made: torch.Tensor,
    kept: torch.Tensor,
    share: torch.Tensor,
    rows: torch.Tensor,
    shape: DeltaShape,
    states: DeltaStates,
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
