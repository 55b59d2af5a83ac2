"""The second products of adapters by rows: see `expand_rows`.

The matrix unit takes sixteen rows of an adapter at once, of which a step may have two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.adapters.adapter_kernels import around_of, factors_of, outputs_of, tile_of
from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit


@launched
@triton.jit
def expand_rows(
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
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `expand_tiles`, two tokens of a tile after the other two, without the matrix unit.

    The factors stay where they were read, 16 bytes of a rank by a thread. With 128 OUTPUTS a warp's
    halves have every other rank, and few threads have to be asked for a sum.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    part, output, end = outputs_of(tl.program_id(0), rows_0, rows_1, rows_2, GATED, OUTPUTS)
    slot, first, length, own = tile_of(tiles, tl.program_id(1))
    token, next_token = _two_tokens(t_order, first, length)
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
    inside = output < end
    if (slot > 0) | INTO | GATED:
        split = tokens * (PARTS * WIDTH)
        for at in range(0, length, 2):
            both = at + 1 < length
            seen = inner + token * (PARTS * WIDTH) + part * WIDTH
            next_seen = inner + next_token * (PARTS * WIDTH) + part * WIDTH
            at_y = y + token * y_stride + output
            at_next = y + next_token * y_stride + output
            at_out = out + token * out_stride + output
            at_next_out = out + next_token * out_stride + output
            # All is asked for before any of it is needed.
            a = _inner_of(seen, 0, split, own, SPLITS, RANKS)
            next_a = _inner_of(next_seen, 0, split, own, SPLITS, RANKS)
            total = tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
            next_total = tl.load(at_next, mask=inside & both, other=0.0).to(tl.float32)
            if INTO:
                stream = tl.load(at_out, mask=inside, other=0.0)
                next_stream = tl.load(at_next_out, mask=inside & both, other=0.0)
            if GATED:
                other_a = _inner_of(seen + WIDTH, 0, split, own, SPLITS, RANKS)
                next_other_a = _inner_of(next_seen + WIDTH, 0, split, own, SPLITS, RANKS)
                here = tl.load(at_y + rows_0, mask=inside, other=0.0)
                next_here = tl.load(at_next + rows_0, mask=inside & both, other=0.0)
            total += tl.sum(tl.sum(a, axis=0)[:, None] * b, axis=0)
            next_total += tl.sum(tl.sum(next_a, axis=0)[:, None] * b, axis=0)
            if WIDTH > RANKS:
                total, next_total = _more_terms(
                    total, next_total, seen, next_seen, split, factors, rank_stride, own, output,
                    end, SPLITS, RANKS,
                )  # fmt: skip
            total = total * factor + extra
            next_total = next_total * factor + extra
            if GATED:
                other, next_other = here.to(tl.float32), next_here.to(tl.float32)
                other += tl.sum(tl.sum(other_a, axis=0)[:, None] * other_b, axis=0)
                next_other += tl.sum(tl.sum(next_other_a, axis=0)[:, None] * other_b, axis=0)
                if WIDTH > RANKS:
                    other, next_other = _more_terms(
                        other, next_other, seen + WIDTH, next_seen + WIDTH, split, factors,
                        rank_stride, own, output + rows_0, end + rows_0, SPLITS, RANKS,
                    )  # fmt: skip
                other = other * other_factor + other_extra
                next_other = next_other * other_factor + other_extra
                total = gated_unit(total, other, ACTIVATION)
                next_total = gated_unit(next_total, next_other, ACTIVATION)
            if INTO:
                total += stream.to(tl.float32)
                next_total += next_stream.to(tl.float32)
            tl.store(at_out, total.to(out.dtype.element_ty), mask=inside)
            tl.store(at_next_out, next_total.to(out.dtype.element_ty), mask=inside & both)
            token, next_token = _two_tokens(t_order, first + at + 2, length - at - 2)


@triton.jit
def _two_tokens(t_order, first, length):
    """Which tokens are at these two places; 0 where there is none."""
    token = tl.load(t_order + first, mask=length > 0, other=0)
    return token, tl.load(t_order + first + 1, mask=length > 1, other=0)


@triton.jit
def _inner_of(seen, start, split_stride, own, SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """[SPLITS, RANKS]: one token's, read by different threads."""
    rank = start + tl.arange(0, RANKS)[None, :]
    split = tl.arange(0, SPLITS)[:, None]
    return tl.load(seen + split * split_stride + rank, mask=rank < own, other=0.0)


@triton.jit
def _more_terms(
    total,
    next_total,
    seen,
    next_seen,
    split_stride,
    factors,
    rank_stride,
    own,
    output,
    end,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Two tokens' totals [OUTPUTS], and the terms of ranks behind the first `RANKS`."""
    for start in range(RANKS, own, RANKS):
        b = factors_of(factors, start, rank_stride, own, output, end, RANKS)
        a = _inner_of(seen, start, split_stride, own, SPLITS, RANKS)
        next_a = _inner_of(next_seen, start, split_stride, own, SPLITS, RANKS)
        total += tl.sum(tl.sum(a, axis=0)[:, None] * b, axis=0)
        next_total += tl.sum(tl.sum(next_a, axis=0)[:, None] * b, axis=0)
    return total, next_total
