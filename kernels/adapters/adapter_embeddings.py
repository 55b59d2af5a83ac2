"""What low-rank adapters add to embeddings, in one launch: a program per token and outputs.

A token's first factors are one number of each rank, so there is nothing to sum before the second
product, and no order of tokens by adapter that would be worth its launch. What is in which slot is
read on the device: a captured step stays right when slots change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.adapters.adapter_kernels import factors_of
from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.adapter_ops import AdapterWeights

#: Outputs of a program, and ranks that it reads at once.
OUTPUTS, RANKS = 512, 16


def adapt_rows(
    x: torch.Tensor,
    weights: AdapterWeights,
    t_row: torch.Tensor,
    t_adapter: torch.Tensor,
    ranks: torch.Tensor,
) -> None:
    """Add to embeddings x [T, n] what adapters make of their rows of the table, in place."""
    tokens, width = x.shape
    slot, _, rank, _ = weights.down.stride()
    _adapt_rows[(tokens, triton.cdiv(width, OUTPUTS))](
        x,
        weights.down,
        weights.up,
        t_row,
        t_adapter,
        ranks,
        weights.down.shape[3],
        width,
        slot,
        rank,
        *weights.up.stride()[:2],
        OUTPUTS=OUTPUTS,
        RANKS=RANKS,
        num_warps=4,
        **launch_options(x.device),
    )


@launched
@triton.jit
def _adapt_rows(
    x,
    down,
    up,
    t_row,
    t_adapter,
    ranks,
    rows,
    width,
    down_slot,
    down_rank,
    up_slot,
    up_rank,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`OUTPUTS` outputs of one token: x += down[:, row] · up."""
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot, row = tl.load(t_adapter + token), tl.load(t_row + token)
    own = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
    if (own > 0) & (row >= 0) & (row < rows):
        output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        firsts, seconds = down + (slot - 1) * down_slot + row, up + (slot - 1) * up_slot
        at = x + token * width + output
        total = tl.load(at, mask=output < width, other=0.0).to(tl.float32)
        for start in range(0, own, RANKS):
            rank = start + tl.arange(0, RANKS)
            a = tl.load(firsts + rank.to(tl.int64) * down_rank, mask=rank < own, other=0.0)
            b = factors_of(seconds, start, up_rank, own, output, width, RANKS)
            total += tl.sum(a.to(tl.float32)[:, None] * b.to(tl.float32), axis=0)
        tl.store(at, total.to(x.dtype.element_ty), mask=output < width)
