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
from tokenpod.kernels.triton.adapter_sums import RANKS
from tokenpod.kernels.triton.launch import await_inputs, launch_options

#: Steps of up to so many tokens are planned by one launch.
MOST_PLANNED = 128
#: Units of a tile, at most: 256 ranks.
_MOST_UNITS = 256 // RANKS
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
    #: [T], as it was given.
    t_adapter: torch.Tensor
    #: Of steps of few tokens, for products that sum adapters' terms themselves: [T] int32, the tile
    #: of each token that has an adapter, -1 of others; [tiles · blocks, 4] int32, units of 16 ranks
    #: of a tile's adapter, its tile, slot, block and how many ranks it has; and [1] how many.
    t_tile: torch.Tensor | None = None
    units: torch.Tensor | None = None
    count: torch.Tensor | None = None


def tiles_for(tokens: int) -> Tiles:
    """How products of so many tokens are cut."""
    return next(cut for most, cut in TILES if tokens <= most)


def plan_adapters(
    t_adapter: torch.Tensor, ranks: torch.Tensor, cut: Tiles | None = None
) -> AdapterPlan:
    """A `Plan`; see `PlanAdapters`. Nothing waits for the device. `cut`: what to try instead."""
    tokens, slots = len(t_adapter), len(ranks)
    cut = cut or tiles_for(tokens)
    if tokens <= MOST_PLANNED:
        return _planned(t_adapter, ranks, cut)
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
    return Plan(order, tiles, ranks, cut, t_adapter)


def _planned(t_adapter: torch.Tensor, ranks: torch.Tensor, cut: Tiles) -> Plan:
    """The same of few tokens, in one launch."""
    tokens, slots, device = len(t_adapter), len(ranks), t_adapter.device
    tiles = tokens // cut.tokens + min(slots + 1, tokens)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    plan = Plan(
        torch.empty(tokens, dtype=torch.int64, device=device),
        integers(tiles, 3),
        ranks,
        cut,
        t_adapter,
        integers(tokens),
        integers(tiles * _MOST_UNITS, 4),
        integers(1),
    )
    _plan[(1,)](
        t_adapter,
        ranks,
        plan.order,
        plan.tiles,
        plan.t_tile,
        plan.units,
        plan.count,
        tokens,
        slots,
        tiles,
        TOKENS=cut.tokens,
        T_PADDED=triton.next_power_of_2(tokens),
        S_PADDED=triton.next_power_of_2(slots + 1),
        N_PADDED=triton.next_power_of_2(tiles),
        RANKS=RANKS,
        num_warps=4,
    )
    return plan


def adapt(x: torch.Tensor, weights: AdapterWeights, plan: AdapterPlan) -> torch.Tensor:
    """See `Adapt`. Rows of x are contiguous."""
    delta = torch.empty((len(x), sum(weights.rows)), dtype=x.dtype, device=x.device)
    expand(shrink(x, weights, plan), weights, plan, delta, add=False)
    return delta


def shrink(
    x: torch.Tensor,
    weights: AdapterWeights,
    plan: Plan,
    norm_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """[splits, T, parts, width] float32: parts of x · downᵀ; x times `norm_weight` if there is one.

    Of tokens without an adapter and beyond an adapter's rank it says nothing.
    """
    cut, tokens, (_, parts, rank, inputs) = plan.cut, len(x), weights.down.shape
    assert parts <= _MOST_PARTS
    blocks, width = triton.cdiv(rank, RANKS), width_of(rank)
    inner = torch.empty((cut.splits, tokens, parts, width), dtype=torch.float32, device=x.device)
    _shrink[(len(plan.tiles), parts * blocks, cut.splits)](
        x,
        weights.down,
        x if norm_weight is None else norm_weight,
        plan.order,
        plan.tiles,
        plan.ranks,
        inner,
        tokens,
        inputs,
        triton.cdiv(triton.cdiv(inputs, cut.splits), cut.inputs) * cut.inputs,
        x.stride(0),
        *weights.down.stride()[:3],
        NORM=norm_weight is not None,
        PARTS=parts,
        BLOCKS=blocks,
        WIDTH=width,
        TOKENS=cut.tokens,
        INPUTS=cut.inputs,
        RANKS=RANKS,
        num_warps=cut.warps,
        **launch_options(x.device),
    )
    return inner


def expand(
    inner: torch.Tensor,
    weights: AdapterWeights,
    plan: Plan,
    y: torch.Tensor,
    *,
    add: bool,
) -> None:
    """Y [T, out] = what adapters add, zeros for tokens without one; or += with `add`."""
    cut, (splits, tokens, parts, width) = plan.cut, inner.shape
    rows = [*weights.rows, *[0] * (_MOST_PARTS - parts)]
    columns = sum(triton.cdiv(n, cut.outputs) for n in rows)
    bias = weights.bias
    _expand[(len(plan.tiles), columns)](
        inner,
        weights.up,
        bias,
        plan.order,
        plan.tiles,
        plan.ranks,
        y,
        tokens,
        *rows,
        *weights.up.stride()[:2],
        0 if bias is None else bias.stride(0),
        y.stride(0),
        ADD=add,
        PARTS=parts,
        WIDTH=width,
        SPLITS=splits,
        TOKENS=cut.tokens,
        OUTPUTS=cut.outputs,
        RANKS=RANKS,
        num_warps=cut.warps,
        **launch_options(y.device),
    )


def width_of(rank: int) -> int:
    """Numbers that `shrink` keeps room for, of each part of a token."""
    return max(triton.next_power_of_2(rank), RANKS)


@triton.jit(do_not_specialize=["tokens", "slots", "count"])
def _plan(
    t_adapter,
    ranks,
    order,
    tiles,
    t_tile,
    units,
    unit_count,
    tokens,
    slots,
    count,
    TOKENS: tl.constexpr,
    T_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr,
    N_PADDED: tl.constexpr,
    RANKS: tl.constexpr,
):
    """See `Plan`; one program."""
    token = tl.arange(0, T_PADDED)
    # Padding is behind all slots.
    own = tl.load(t_adapter + token, mask=token < tokens, other=S_PADDED).to(tl.int32)
    kind = tl.arange(0, S_PADDED)
    is_kind = own[None, :] == kind[:, None]
    counts = tl.sum(is_kind.to(tl.int32), axis=1)
    begins = tl.cumsum(counts, 0) - counts
    number = (counts + TOKENS - 1) // TOKENS
    last = tl.cumsum(number, 0)
    first = last - number
    # A token's place: behind those of lower slots, and those of its own before it.
    place = tl.sum((own[None, :] < own[:, None]).to(tl.int32), axis=1)
    same = (own[None, :] == own[:, None]) & (token[None, :] < token[:, None])
    among = tl.sum(same.to(tl.int32), axis=1)
    tl.store(order + place + among, token.to(tl.int64), mask=token < tokens)
    at = tl.sum(tl.where(is_kind, first[:, None], 0), axis=0) + among // TOKENS
    tl.store(t_tile + token, tl.where(own > 0, at, -1), mask=token < tokens)
    rank = tl.load(ranks + kind - 1, mask=(kind > 0) & (kind <= slots), other=0)
    blocks = (rank + RANKS - 1) // RANKS
    before = tl.cumsum(number * blocks, 0) - number * blocks
    tl.store(unit_count, tl.sum(number * blocks, axis=0))
    for j in range(tl.cdiv(tokens, TOKENS)):
        there = j < number
        tile = tiles + (first + j) * 3
        tl.store(tile, kind, mask=there)
        tl.store(tile + 1, begins + j * TOKENS, mask=there)
        tl.store(tile + 2, tl.minimum(counts - j * TOKENS, TOKENS), mask=there)
        for block in range(tl.max(blocks, axis=0)):
            unit = units + (before + j * blocks + block) * 4
            has = there & (block < blocks)
            tl.store(unit, first + j, mask=has)
            tl.store(unit + 1, kind, mask=has)
            tl.store(unit + 2, tl.zeros_like(kind) + block, mask=has)
            tl.store(unit + 3, tl.minimum(rank - block * RANKS, RANKS), mask=has)
    # The others have no tokens.
    rest = tl.arange(0, N_PADDED)
    unused = (rest >= tl.sum(number, axis=0)) & (rest < count)
    for field in tl.static_range(3):
        tl.store(tiles + rest * 3 + field, tl.zeros_like(rest), mask=unused)


@triton.jit
def _shrink(
    x,
    down,
    norm_weight,
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
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
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
            if NORM:
                scale = tl.load(norm_weight + k, mask=k < inputs, other=0.0).to(tl.float32)
                a = (a.to(tl.float32) * scale[None, :]).to(a.dtype)
            b = tl.load(
                factors + k[:, None],
                mask=(rank[None, :] < own) & (k[:, None] < inputs),
                other=0.0,
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        out = inner + (split * tokens + token[:, None]).to(tl.int64) * (PARTS * WIDTH)
        tl.store(out + part * WIDTH + rank[None, :], total, mask=there[:, None])


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
    delta_stride,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, `OUTPUTS` outputs of one part -> delta, or added to it."""
    await_inputs(OVERLAP)
    tile = tiles + tl.program_id(0) * 3
    slot, first, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if (length > 0) & ((slot > 0) | (not ADD)):
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
        seen = inner + token[:, None].to(tl.int64) * (PARTS * WIDTH) + part * WIDTH
        place = (slot - 1).to(tl.int64)
        factors = up + place * slot_stride + output[None, :]
        total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
        for start in range(0, own, RANKS):
            rank = start + tl.arange(0, RANKS)
            a = tl.zeros((TOKENS, RANKS), tl.float32)
            for split in range(SPLITS):
                step = (split * tokens).to(tl.int64) * (PARTS * WIDTH)
                mask = there[:, None] & (rank[None, :] < own)
                a += tl.load(seen + step + rank[None, :], mask=mask, other=0.0)
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
        out = delta + token[:, None].to(tl.int64) * delta_stride + output[None, :]
        mask = there[:, None] & (output[None, :] < end)
        if ADD:
            total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, total.to(delta.dtype.element_ty), mask=mask)
