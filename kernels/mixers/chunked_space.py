"""The state space by products, as `chunked` has rows go through memories.

Within a chunk what tokens find of each other is masked attention without a softmax, whose weights
are decays (Dao and Gu, "Transformers are SSMs", 2024, section 6).
"""

from __future__ import annotations

import torch

from tokenpod.kernels.mixers.chunked import Net, go_through
from tokenpod.kernels.mixers.reference_space import falls_of, gated_norm, parts_of, steps_of
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
    """Rows of one token together, others in chunks; `StateSpace` says what."""

    def gates(said: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = steps_of(said, weights)
        return falls_of(length, weights)[:, :, None], length

    def singles(
        made: torch.Tensor, kept: torch.Tensor, step: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = parts_of(made, shape)
        memory *= kept[:, :, :, None]
        # By groups of heads that share queries and keys.
        groups = memory.view(len(memory), shape.key_heads, -1, shape.key_dim, shape.value_dim)
        written = (v * step[:, :, None]).view(*groups.shape[:3], shape.value_dim)
        groups.addcmul_(k[:, :, None, :, None], written[:, :, :, None])
        found = torch.einsum("ngk,ngmkv->ngmv", q, groups).reshape(v.shape)
        return found + weights.skip[:, None] * v

    def chunk(
        made: torch.Tensor, falls: torch.Tensor, step: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = parts_of(made, shape)
        heard = _chunk(q, k, v * step[:, :, None], falls[:, :, 0], memory)
        return heard + weights.skip[:, None] * v

    net = Net(shape, weights.conv, weights.conv_bias, gates, singles, chunk)
    found = go_through(net, inputs.mixed, inputs.step, states, plan)
    return gated_norm(found, inputs.gate, weights)


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
