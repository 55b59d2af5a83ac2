"""The kernels of `adapters`: tokens sorted into tiles, and both products of a tile's adapter.

What no overlapping kernel writes (tiles, ranks, second factors) is read before the wait for the
kernel before; see `launch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, settled
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit


@launched
@triton.jit(do_not_specialize=["tokens", "slots", "count"])
def plan_tiles(
    t_adapter,
    ranks,
    order,
    tiles,
    tokens,
    slots,
    count,
    TOKENS: tl.constexpr,
    T_PADDED: tl.constexpr,
    S_PADDED: tl.constexpr,
    N_PADDED: tl.constexpr,
):
    """Sort tokens by adapter, as `AdaptedTokens` has them; one program."""
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
    rank = tl.load(ranks + kind - 1, mask=(kind > 0) & (kind <= slots), other=0)
    for j in range(tl.cdiv(tokens, TOKENS)):
        there = j < number
        tile = tiles + (first + j) * 4
        tl.store(tile, tl.where(rank > 0, kind, 0), mask=there)
        tl.store(tile + 1, begins + j * TOKENS, mask=there)
        tl.store(tile + 2, tl.minimum(counts - j * TOKENS, TOKENS), mask=there)
        tl.store(tile + 3, rank, mask=there)
    # The others have no tokens.
    rest = tl.arange(0, N_PADDED)
    unused = (rest >= tl.sum(number, axis=0)) & (rest < count)
    for field in tl.static_range(4):
        tl.store(tiles + rest * 4 + field, tl.zeros_like(rest), mask=unused)


@launched
@triton.jit
def shrink_tiles(
    x,
    down,
    t_order,
    tiles,
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
    slot, first, length, own = tile_of(tiles, tl.program_id(0))
    part, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    split = tl.program_id(2)
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


@launched
@triton.jit
def expand_tiles(
    inner,
    up,
    bias,
    scale,
    scaled,
    t_order,
    tiles,
    y,
    out,
    tokens,
    rows_0,
    rows_1,
    rows_2,
    slot_stride,
    rank_stride,
    bias_stride,
    scale_stride,
    y_stride,
    out_stride,
    INTO: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile, OUTPUTS outputs of one part: y -> out, or added to it; or of two parts, and gated.

    Where out is y, nothing is done for tokens without an adapter.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    part, output, end = outputs_of(tl.program_id(1), rows_0, rows_1, rows_2, GATED, OUTPUTS)
    slot, first, length, own = tile_of(tiles, tl.program_id(0))
    at = tl.arange(0, TOKENS)
    there = at < length
    token = tl.load(t_order + first + at, mask=there, other=0).to(tl.int64)
    place = (slot - 1).to(tl.int64)
    factors = up + place * slot_stride
    # What no overlapping kernel writes is on its way before the input is there.
    b = factors_of(factors, 0, rank_stride, own, output, end, RANKS)
    if GATED:
        other_b = factors_of(factors, 0, rank_stride, own, output + rows_0, end + rows_0, RANKS)
    factor, extra = around_of(bias, scale, scaled, slot, bias_stride, scale_stride, output, end)
    if GATED:
        other_factor, other_extra = around_of(
            bias, scale, scaled, slot, bias_stride, scale_stride, output + rows_0, end + rows_0
        )
    await_inputs(OVERLAP)
    if (length > 0) & ((slot > 0) | INTO | GATED):
        seen = inner + token[:, None] * (PARTS * WIDTH)
        split = tokens * (PARTS * WIDTH)
        mask = there[:, None] & (output[None, :] < end)
        at_y = y + token[:, None] * y_stride + output[None, :]
        total = _terms(
            b, seen + part * WIDTH, split, factors, rank_stride, own, output, end, there,
            SPLITS, TOKENS, OUTPUTS, RANKS, ASSEMBLY,
        )  # fmt: skip
        total += tl.load(at_y, mask=mask, other=0.0).to(tl.float32)
        total = total * factor[None, :] + extra[None, :]
        at_out = out + token[:, None] * out_stride + output[None, :]
        if GATED:
            other = _terms(
                other_b, seen + WIDTH, split, factors, rank_stride, own, output + rows_0,
                end + rows_0, there, SPLITS, TOKENS, OUTPUTS, RANKS, ASSEMBLY,
            )  # fmt: skip
            other += tl.load(at_y + rows_0, mask=mask, other=0.0).to(tl.float32)
            other = other * other_factor[None, :] + other_extra[None, :]
            total = gated_unit(total, other, ACTIVATION)
        if INTO:
            total += tl.load(at_out, mask=mask, other=0.0).to(tl.float32)
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def around_of(bias, scale, scaled, slot, bias_stride, scale_stride, output, end):
    """[outputs] float32: what a slot's sums are multiplied with, and what is added then."""
    place, inside = (slot - 1).to(tl.int64), (slot > 0) & (output < end)
    factor = tl.full(output.shape, 1.0, tl.float32)
    extra = tl.zeros(output.shape, tl.float32)
    if scale is not None:
        # Where no slot is scaled, nothing is read.
        flag = tl.load(scaled + place, mask=slot > 0, other=0)
        at = scale + place * scale_stride + output
        factor = tl.load(at, mask=inside & (flag > 0), other=1.0)
    if bias is not None:
        at = bias + place * bias_stride + output
        extra = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return factor, extra


@triton.jit
def tile_of(tiles, number):
    """Its slot, its first token's place in the order, how many tokens, and the slot's rank."""
    tile = tiles + number * 4
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def outputs_of(column, rows_0, rows_1, rows_2, GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """Of a program: its part of the product, its outputs, and where the part ends."""
    blocks_0, blocks_1 = tl.cdiv(rows_0, OUTPUTS), tl.cdiv(rows_1, OUTPUTS)
    in_1 = (column >= blocks_0) & (column < blocks_0 + blocks_1) & (not GATED)
    in_2 = (column >= blocks_0 + blocks_1) & (not GATED)
    part = in_1.to(tl.int32) + 2 * in_2.to(tl.int32)
    begin = tl.where(in_2, rows_0 + rows_1, tl.where(in_1, rows_0, 0))
    end = begin + tl.where(in_2, rows_2, tl.where(in_1, rows_1, rows_0))
    column -= tl.where(in_2, blocks_0 + blocks_1, tl.where(in_1, blocks_0, 0))
    return part, begin + column * OUTPUTS + tl.arange(0, OUTPUTS), end


@triton.jit
def factors_of(factors, start, rank_stride, own, output, end, RANKS: tl.constexpr):
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
    ASSEMBLY: tl.constexpr,
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
        total = settled(tl.dot(a.to(b.dtype), b, total, input_precision="ieee"), ASSEMBLY)
        b = factors_of(factors, start + RANKS, rank_stride, own, output, end, RANKS)
    return total
