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
from tokenpod.kernels.pointwise_ops import Activation
from tokenpod.kernels.triton.launch import await_inputs, launch_options
from tokenpod.kernels.triton.pointwise import gated_unit

#: Steps of up to so many tokens are planned by one launch.
MOST_PLANNED = 128
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
    #: [T], as it was given.
    t_adapter: torch.Tensor


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
    plan = Plan(
        torch.empty(tokens, dtype=torch.int64, device=device),
        torch.empty((tiles, 3), dtype=torch.int32, device=device),
        ranks,
        cut,
        t_adapter,
    )
    _plan[(1,)](
        t_adapter,
        plan.order,
        plan.tiles,
        tokens,
        tiles,
        TOKENS=cut.tokens,
        T_PADDED=triton.next_power_of_2(tokens),
        S_PADDED=triton.next_power_of_2(slots + 1),
        N_PADDED=triton.next_power_of_2(tiles),
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
    inner: torch.Tensor | None = None,
) -> torch.Tensor:
    """[splits, T, parts, width] float32: parts of x · downᵀ; in `inner` if there is one.

    Of tokens without an adapter and beyond an adapter's rank it says nothing.
    """
    cut, tokens, (_, parts, rank, inputs) = plan.cut, len(x), weights.down.shape
    assert parts <= _MOST_PARTS
    blocks, width = triton.cdiv(rank, RANKS), width_of(rank)
    if inner is None:
        inner = room_for(x, weights, plan)
    _shrink[(len(plan.tiles), parts * blocks, cut.splits)](
        x,
        weights.down,
        plan.order,
        plan.tiles,
        plan.ranks,
        inner,
        tokens,
        inputs,
        triton.cdiv(triton.cdiv(inputs, cut.splits), cut.inputs) * cut.inputs,
        x.stride(0),
        *weights.down.stride()[:3],
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


def room_for(x: torch.Tensor, weights: AdapterWeights, plan: Plan) -> torch.Tensor:
    """What `shrink` writes to."""
    _, parts, rank, _ = weights.down.shape
    shape = (plan.cut.splits, len(x), parts, width_of(rank))
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def expand(
    inner: torch.Tensor,
    weights: AdapterWeights,
    plan: Plan,
    y: torch.Tensor,
    *,
    add: bool,
    gated: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> None:
    """Y [T, out] = what adapters add, zeros for tokens without one; or += with `add`.

    With an `activation` y stays as it is, and `gated` [T, out / 2] becomes the gated unit of the
    sum, whose first part are gates.
    """
    cut, (splits, tokens, parts, width) = plan.cut, inner.shape
    rows = [*weights.rows, *[0] * (_MOST_PARTS - parts)]
    columns = sum(triton.cdiv(n, cut.outputs) for n in rows)
    if activation is not None:
        assert gated is not None, activation
        assert weights.rows[0] * 2 == sum(weights.rows), weights.rows
        columns = triton.cdiv(weights.rows[0], cut.outputs)
    bias = weights.bias
    _expand[(len(plan.tiles), columns)](
        inner,
        weights.up,
        bias,
        plan.order,
        plan.tiles,
        plan.ranks,
        y,
        y if gated is None else gated,
        tokens,
        *rows,
        *weights.up.stride()[:2],
        0 if bias is None else bias.stride(0),
        y.stride(0),
        ADD=add,
        ACTIVATION="none" if activation is None else activation.value,
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
    return max(1 << (rank - 1).bit_length(), RANKS)


@triton.jit(do_not_specialize=["tokens", "count"])
def _plan(
    t_adapter,
    order,
    tiles,
    tokens,
    count,
    TOKENS: tl.constexpr,
    T_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr,
    N_PADDED: tl.constexpr,
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
    first = tl.cumsum(number, 0) - number
    # A token's place: behind those of lower slots, and those of its own before it.
    place = tl.sum((own[None, :] < own[:, None]).to(tl.int32), axis=1)
    same = (own[None, :] == own[:, None]) & (token[None, :] < token[:, None])
    among = tl.sum(same.to(tl.int32), axis=1)
    tl.store(order + place + among, token.to(tl.int64), mask=token < tokens)
    for j in range(tl.cdiv(tokens, TOKENS)):
        there = j < number
        tile = tiles + (first + j) * 3
        tl.store(tile, kind, mask=there)
        tl.store(tile + 1, begins + j * TOKENS, mask=there)
        tl.store(tile + 2, tl.minimum(counts - j * TOKENS, TOKENS), mask=there)
    # The others have no tokens.
    rest = tl.arange(0, N_PADDED)
    unused = (rest >= tl.sum(number, axis=0)) & (rest < count)
    for field in tl.static_range(3):
        tl.store(tiles + rest * 3 + field, tl.zeros_like(rest), mask=unused)


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
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, 16 ranks of one part, `share` inputs -> its part of inner [T, PARTS, ranks]."""
    tile = tiles + tl.program_id(0) * 3
    slot, first, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    part, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    split = tl.program_id(2)
    own = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
    at = tl.arange(0, TOKENS)
    there = at < length
    token = tl.load(t_order + first + at, mask=there, other=0)
    await_inputs(OVERLAP)
    if (length > 0) & (block * RANKS < own):
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
    y,
    gated,
    tokens,
    rows_0,
    rows_1,
    rows_2,
    slot_stride,
    rank_stride,
    bias_stride,
    y_stride,
    ADD: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, `OUTPUTS` outputs of one part -> y, or added to it; or of two, and gated."""
    GATED: tl.constexpr = ACTIVATION != "none"
    column = tl.program_id(1)
    blocks_0, blocks_1 = tl.cdiv(rows_0, OUTPUTS), tl.cdiv(rows_1, OUTPUTS)
    in_1 = (column >= blocks_0) & (column < blocks_0 + blocks_1) & (not GATED)
    in_2 = (column >= blocks_0 + blocks_1) & (not GATED)
    part = in_1.to(tl.int32) + 2 * in_2.to(tl.int32)
    begin = tl.where(in_2, rows_0 + rows_1, tl.where(in_1, rows_0, 0))
    end = begin + tl.where(in_2, rows_2, tl.where(in_1, rows_1, rows_0))
    column -= tl.where(in_2, blocks_0 + blocks_1, tl.where(in_1, blocks_0, 0))
    output = begin + column * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tiles + tl.program_id(0) * 3
    slot, first, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    own = tl.load(ranks + slot - 1, mask=slot > 0, other=0)
    at = tl.arange(0, TOKENS)
    there = at < length
    token = tl.load(t_order + first + at, mask=there, other=0).to(tl.int64)
    place = (slot - 1).to(tl.int64)
    factors = up + place * slot_stride
    # What no overlapping kernel writes is on its way before the input is there.
    b = _factors(factors, 0, rank_stride, own, output, end, RANKS)
    if GATED:
        other_b = _factors(factors, 0, rank_stride, own, output + rows_0, end + rows_0, RANKS)
    await_inputs(OVERLAP)
    if (length > 0) & ((slot > 0) | (not ADD) | GATED):
        mask = there[:, None] & (output[None, :] < end)
        at_y = y + token[:, None] * y_stride + output[None, :]
        seen = inner + token[:, None] * (PARTS * WIDTH)
        split = tokens * (PARTS * WIDTH)
        total = _terms(
            b, seen + part * WIDTH, split, factors, rank_stride, own, output, end, there,
            SPLITS, TOKENS, OUTPUTS, RANKS,
        )  # fmt: skip
        has_bias = (slot > 0) & (output < end)
        if bias is not None:
            at_bias = bias + place * bias_stride + output
            total += tl.load(at_bias, mask=has_bias, other=0.0).to(tl.float32)[None, :]
        if ADD:
            total += tl.load(at_y, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            other = _terms(
                other_b, seen + WIDTH, split, factors, rank_stride, own, output + rows_0,
                end + rows_0, there, SPLITS, TOKENS, OUTPUTS, RANKS,
            )  # fmt: skip
            if bias is not None:
                at_bias = bias + place * bias_stride + rows_0 + output
                other += tl.load(at_bias, mask=has_bias, other=0.0).to(tl.float32)[None, :]
            other += tl.load(at_y + rows_0, mask=mask, other=0.0).to(tl.float32)
            unit = gated_unit(total, other, ACTIVATION)
            at_gated = gated + token[:, None] * rows_0 + output[None, :]
            tl.store(at_gated, unit.to(gated.dtype.element_ty), mask=mask)
        else:
            tl.store(at_y, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _factors(factors, start, rank_stride, own, output, end, RANKS: tl.constexpr):
    """[RANKS, outputs]: second factors of ranks from `start` on."""
    rank = start + tl.arange(0, RANKS)
    at = factors + rank[:, None] * rank_stride + output[None, :]
    return tl.load(at, mask=(rank[:, None] < own) & (output[None, :] < end), other=0.0)


@triton.jit
def _terms(
    b,
    seen,
    split_stride,
    factors,
    rank_stride,
    own,
    output,
    end,
    there,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """[TOKENS, OUTPUTS] float32: sums of splits of inner, times second factors, the first in b."""
    total = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for start in range(0, own, RANKS):
        rank = start + tl.arange(0, RANKS)
        a = tl.zeros((TOKENS, RANKS), tl.float32)
        mask = there[:, None] & (rank[None, :] < own)
        for split in tl.static_range(SPLITS):
            at = seen + split * split_stride + rank[None, :]
            a += tl.load(at, mask=mask, other=0.0)
        total = tl.dot(a.to(b.dtype), b, total, input_precision="ieee")
        b = _factors(factors, start + RANKS, rank_stride, own, output, end, RANKS)
    return total
