"""Low-rank adapters on a GPU: two launches for each product, whatever tokens have which adapter.

    tokens by adapter         sorted once a step: each adapter's lie beside each other
    tiles of them             one adapter each, so its factors are read once for all of its tokens
    shrink   x · downᵀ        inputs divided among programs, whose parts are kept apart
    expand   Σ parts · upᵀ    outputs divided among programs; zeros for tokens without an adapter

The grids depend on the number of tokens and slots alone, and what is in which slot, of which rank,
is read on the device: so both are part of captured steps, and a captured step stays right when
slots change. The gathering by segments is that of Punica and S-LoRA (Chen et al. 2023, Sheng et al.
2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenpod.kernels.adapter_ops import AdapterPlan, AdapterWeights
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: Ranks that a program multiplies at once: the least that a matrix unit takes.
RANKS = 16
#: Parts of a product, at most: queries, keys and values.
_MOST_PARTS = 3


class Tiles(NamedTuple):
    """How the two products are cut."""

    #: Tokens of a tile.
    tokens: int
    #: Inputs that a program reads at once, and among how many programs they are divided.
    inputs: int
    splits: int
    #: Outputs of a program.
    outputs: int
    warps: int


#: For steps of up to so many tokens; beyond, the last.
TILES = (
    (16, Tiles(16, 256, 8, 128, 4)),
    (256, Tiles(16, 256, 4, 128, 4)),
    (1 << 31, Tiles(64, 128, 1, 128, 4)),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which tokens of a step have which adapter."""

    #: [T] int64: tokens in order of their slots; those without an adapter first.
    order: torch.Tensor
    #: [tiles, 3] int32: its slot, from 1, 0 being none; the place of its first token in `order`;
    #: how many tokens it has, perhaps none.
    tiles: torch.Tensor
    #: [S] int32
    ranks: torch.Tensor
    cut: Tiles


def tiles_for(tokens: int) -> Tiles:
    """How products of so many tokens are cut."""
    return next(cut for most, cut in TILES if tokens <= most)


def plan_adapters(
    t_adapter: torch.Tensor, ranks: torch.Tensor, cut: Tiles | None = None
) -> AdapterPlan:
    """A `Plan`; see `PlanAdapters`. Nothing waits for the device. `cut`: what to try instead."""
    tokens, slots = len(t_adapter), len(ranks)
    cut = cut or tiles_for(tokens)
    kinds = torch.arange(slots + 1, device=t_adapter.device)
    counts = (t_adapter[:, None] == kinds).sum(0)
    ends, last = counts.cumsum(0), (-(-counts // cut.tokens)).cumsum(0)
    # Each slot begins a tile, and the others are full.
    number = torch.arange(tokens // cut.tokens + min(slots + 1, tokens), device=t_adapter.device)
    slot = torch.searchsorted(last, number, right=True).clamp_(max=slots)
    before = number - (last - (-(-counts // cut.tokens)))[slot]
    first = (ends - counts)[slot] + before * cut.tokens
    length = (ends[slot] - first).clamp_(0, cut.tokens)
    tiles = torch.stack((slot, first, length), dim=1).to(torch.int32)
    order = torch.sort(t_adapter, stable=True).indices
    return Plan(order, tiles, ranks, cut)


def adapt(x: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> torch.Tensor:
    """See `Adapt`. Rows of x are contiguous."""
    chosen: Plan = plan
    cut, tokens, (_, parts, rank, inputs) = chosen.cut, len(x), weights.down.shape
    assert parts <= _MOST_PARTS
    blocks = triton.cdiv(rank, RANKS)
    inner = torch.empty(
        (cut.splits, tokens, parts, blocks * RANKS), dtype=torch.float32, device=x.device
    )
    tiles, options = len(chosen.tiles), launch_options(x.device)
    _shrink[(tiles, parts * blocks, cut.splits)](
        x,
        weights.down,
        chosen.order,
        chosen.tiles,
        chosen.ranks,
        inner,
        tokens,
        inputs,
        triton.cdiv(triton.cdiv(inputs, cut.splits), cut.inputs) * cut.inputs,
        x.stride(0),
        *weights.down.stride()[:3],
        PARTS=parts,
        BLOCKS=blocks,
        TOKENS=cut.tokens,
        INPUTS=cut.inputs,
        RANKS=RANKS,
        num_warps=cut.warps,
        **options,
    )
    rows = [*weights.rows, *[0] * (_MOST_PARTS - parts)]
    outputs = sum(rows)
    delta = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    columns = sum(triton.cdiv(n, cut.outputs) for n in rows)
    bias = weights.bias
    _expand[(tiles, columns)](
        inner,
        weights.up,
        bias,
        chosen.order,
        chosen.tiles,
        chosen.ranks,
        delta,
        tokens,
        *rows,
        *weights.up.stride()[:2],
        0 if bias is None else bias.stride(0),
        PARTS=parts,
        BLOCKS=blocks,
        SPLITS=cut.splits,
        TOKENS=cut.tokens,
        OUTPUTS=cut.outputs,
        RANKS=RANKS,
        num_warps=cut.warps,
        **options,
    )
    return delta


@triton.jit
def _shrink(
    x,
    down,
    t_order,
    tiles,
    ranks,
    inner,
    tokens,
    inputs,
    share,
    x_stride,
    slot_stride,
    part_stride,
    rank_stride,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, 16 ranks of one part, `share` inputs -> its part of inner [T, PARTS, ranks]."""
    await_inputs(OVERLAP)
    tile = tiles + tl.program_id(0) * 3
    slot, first, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    part, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    split = tl.program_id(2)
    own = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
    if (length > 0) & (block * RANKS < own):
        at = tl.arange(0, TOKENS)
        there = at < length
        token = tl.load(t_order + first + at, mask=there, other=0)
        rank = block * RANKS + tl.arange(0, RANKS)
        rows = x + token[:, None] * x_stride
        factors = down + (slot - 1).to(tl.int64) * slot_stride + part * part_stride
        factors += rank[None, :] * rank_stride
        total = tl.zeros((TOKENS, RANKS), tl.float32)
        for start in range(split * share, min(split * share + share, inputs), INPUTS):
            k = start + tl.arange(0, INPUTS)
            a = tl.load(rows + k[None, :], mask=there[:, None] & (k[None, :] < inputs), other=0.0)
            b = tl.load(
                factors + k[:, None],
                mask=(rank[None, :] < own) & (k[:, None] < inputs),
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        width = BLOCKS * RANKS
        out = inner + (split * tokens + token[:, None]).to(tl.int64) * (PARTS * width)
        tl.store(out + part * width + rank[None, :], total, mask=there[:, None])


@triton.jit
def _expand(
    inner,
    up,
    bias,
    t_order,
    tiles,
    ranks,
    delta,
    tokens,
    rows_0,
    rows_1,
    rows_2,
    slot_stride,
    rank_stride,
    bias_stride,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, `OUTPUTS` outputs of one part -> delta."""
    await_inputs(OVERLAP)
    tile = tiles + tl.program_id(0) * 3
    slot, first, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if length > 0:
        column = tl.program_id(1)
        blocks_0, blocks_1 = tl.cdiv(rows_0, OUTPUTS), tl.cdiv(rows_1, OUTPUTS)
        in_1 = (column >= blocks_0) & (column < blocks_0 + blocks_1)
        in_2 = column >= blocks_0 + blocks_1
        part = in_1.to(tl.int32) + 2 * in_2.to(tl.int32)
        begin = tl.where(in_2, rows_0 + rows_1, tl.where(in_1, rows_0, 0))
        end = begin + tl.where(in_2, rows_2, tl.where(in_1, rows_1, rows_0))
        column -= tl.where(in_2, blocks_0 + blocks_1, tl.where(in_1, blocks_0, 0))
        output = begin + column * OUTPUTS + tl.arange(0, OUTPUTS)
        own = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
        at = tl.arange(0, TOKENS)
        there = at < length
        token = tl.load(t_order + first + at, mask=there, other=0)
        width = BLOCKS * RANKS
        seen = inner + token[:, None].to(tl.int64) * (PARTS * width) + part * width
        place = (slot - 1).to(tl.int64)
        factors = up + place * slot_stride + output[None, :]
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, own, RANKS):
            rank = start + tl.arange(0, RANKS)
            a = tl.zeros((TOKENS, RANKS), tl.float32)
            for split in range(SPLITS):
                step = (split * tokens).to(tl.int64) * (PARTS * width)
                a += tl.load(seen + step + rank[None, :], mask=there[:, None], other=0.0)
            b = tl.load(
                factors + rank[:, None] * rank_stride,
                mask=(rank[:, None] < own) & (output[None, :] < end),
                other=0.0,
            )
            total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
        if bias is not None:
            more = (slot > 0) & (output < end)
            total += tl.load(bias + place * bias_stride + output, mask=more, other=0.0).to(
                tl.float32
            )[None, :]
        out = delta + token[:, None].to(tl.int64) * (rows_0 + rows_1 + rows_2) + output[None, :]
        mask = there[:, None] & (output[None, :] < end)
        tl.store(out, total.to(delta.dtype.element_ty), mask=mask)
