"""The gated delta net by products, as `chunked` has rows go through memories.

Within a chunk what each token writes depends on what those before it wrote. That is a triangular
system, solved once for all of the chunk (the WY representation of Yang et al. 2024).
"""

from __future__ import annotations

import torch

from tokenpod.kernels.mixers.chunked import Net, go_through
from tokenpod.kernels.mixers.reference_delta import gated_norm, heads_of, log_decay
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentPlan,
    RecurrentStates,
)

#: Tokens with decays of each number of a key that are not cut further.
LEAST_CUT = 8


def gated_delta(
    inputs: DeltaInputs,
    weights: DeltaWeights,
    shape: MemoryShape,
    states: RecurrentStates,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """Rows of one token together, others in chunks; `GatedDelta` says what."""

    def gates(said: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        write, decay = said.tensor_split([shape.value_heads], dim=1)
        return log_decay(decay, weights), write.float().sigmoid()

    def singles(
        made: torch.Tensor, kept: torch.Tensor, share: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = heads_of(made, shape)
        memory *= kept[:, :, :, None]
        missing = (v - torch.einsum("nhk,nhkv->nhv", k, memory)) * share[:, :, None]
        memory.addcmul_(k[:, :, :, None], missing[:, :, None])
        return torch.einsum("nhk,nhkv->nhv", q, memory)

    def chunk(
        made: torch.Tensor, falls: torch.Tensor, share: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        return _chunk(*heads_of(made, shape), falls, share, memory)

    net = Net(shape, weights.conv, None, gates, singles, chunk)
    said = torch.cat([inputs.write, inputs.decay], dim=1)
    return gated_norm(go_through(net, inputs.mixed, said, states, plan), inputs.gate, weights)


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
