"""The second products of adapters by rows: see `expand_rows`.

The matrix unit takes sixteen rows of an adapter at once, of which a step may have two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.adapter_kernels import (
    around_of,
    factors_of,
    outputs_of,
    tile_of,
)
from tokenpod.kernels.triton.launch import await_inputs
from tokenpod.kernels.triton.pointwise import gated_unit


@triton.jit
def expand_rows(
    inner,
    up,
    bias,
    scale,
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
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `expand_tiles`, two tokens of a tile after the other two, without the matrix unit.

    The factors stay where they were read, 16 bytes of a rank by a thread. With 128 OUTPUTS a warp's
    halves have every other rank, and few threads have to be asked for a sum.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    part, output, end = outputs_of(tl.program_id(0), rows_0, rows_1, rows_2, GATED, OUTPUTS)
    slot, first, length, own, scaled = tile_of(tiles, tl.program_id(1))
    token, next_token = _two_tokens(t_order, first, length)
    place = (slot - 1).to(tl.int64)
    factors = up + place * slot_stride
    # What no overlapping kernel writes is on its way before the input is there.
    b = factors_of(factors, 0, rank_stride, own, output, end, RANKS)
    if GATED:
        other_b = factors_of(factors, 0, rank_stride, own, output + rows_0, end + rows_0, RANKS)
    await_inputs(OVERLAP)
    inside = output < end
    if (slot > 0) | INTO | GATED:
        split = tokens * (PARTS * WIDTH)
        if PREFETCH:
            a, base, other_a, other_base, stream = _asked(
                inner, part, split, own, y, out, token, output, inside & (length > 0), rows_0,
                y_stride, out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
            )  # fmt: skip
            next_a, next_base, next_other_a, next_other_base, next_stream = _asked(
                inner, part, split, own, y, out, next_token, output, inside & (length > 1), rows_0,
                y_stride, out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
            )  # fmt: skip
        factor, extra = around_of(bias, scale, scaled, slot, bias_stride, scale_stride, output, end)
        if GATED:
            other_factor, other_extra = around_of(
                bias, scale, scaled, slot, bias_stride, scale_stride, output + rows_0, end + rows_0
            )
        for at in range(0, length, 2):
            both = inside & (at + 1 < length)
            if not PREFETCH:
                # All is asked for before any of it is needed.
                a, base, other_a, other_base, stream = _asked(
                    inner, part, split, own, y, out, token, output, inside, rows_0, y_stride,
                    out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
                )  # fmt: skip
                next_a, next_base, next_other_a, next_other_base, next_stream = _asked(
                    inner, part, split, own, y, out, next_token, output, both, rows_0, y_stride,
                    out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
                )  # fmt: skip
            seen = inner + token * (PARTS * WIDTH) + part * WIDTH
            next_seen = inner + next_token * (PARTS * WIDTH) + part * WIDTH
            at_out = out + token * out_stride + output
            at_next_out = out + next_token * out_stride + output
            token, next_token = _two_tokens(t_order, first + at + 2, length - at - 2)
            if PREFETCH:
                later = inside & (at + 2 < length)
                later_a, later_base, later_other_a, later_other_base, later_stream = _asked(
                    inner, part, split, own, y, out, token, output, later, rows_0, y_stride,
                    out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
                )  # fmt: skip
                last = inside & (at + 3 < length)
                last_a, last_base, last_other_a, last_other_base, last_stream = _asked(
                    inner, part, split, own, y, out, next_token, output, last, rows_0, y_stride,
                    out_stride, INTO, GATED, PARTS, WIDTH, SPLITS, RANKS,
                )  # fmt: skip
            total = base.to(tl.float32) + tl.sum(tl.sum(a, axis=0)[:, None] * b, axis=0)
            next_total = next_base.to(tl.float32)
            next_total += tl.sum(tl.sum(next_a, axis=0)[:, None] * b, axis=0)
            if WIDTH > RANKS:
                total, next_total = _more_terms(
                    total, next_total, seen, next_seen, split, factors, rank_stride, own, output,
                    end, SPLITS, RANKS,
                )  # fmt: skip
            total = total * factor + extra
            next_total = next_total * factor + extra
            if GATED:
                other, next_other = other_base.to(tl.float32), next_other_base.to(tl.float32)
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
            tl.store(at_next_out, next_total.to(out.dtype.element_ty), mask=both)
            if PREFETCH:
                a, base, other_a, other_base = later_a, later_base, later_other_a, later_other_base
                next_a, next_base, next_other_a = last_a, last_base, last_other_a
                next_other_base, stream, next_stream = last_other_base, later_stream, last_stream


@triton.jit
def _asked(
    inner,
    part,
    split_stride,
    own,
    y,
    out,
    token,
    output,
    inside,
    rows_0,
    y_stride,
    out_stride,
    INTO: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """One token's numbers: of the first ranks, of the base, both of the gated half, the stream's.

    What there is none of is what comes before it.
    """
    seen = inner + token * (PARTS * WIDTH) + part * WIDTH
    at_y = y + token * y_stride + output
    a = _inner_of(seen, 0, split_stride, own, SPLITS, RANKS)
    base = tl.load(at_y, mask=inside, other=0.0)
    other_a, other_base, stream = a, base, base
    if GATED:
        other_a = _inner_of(seen + WIDTH, 0, split_stride, own, SPLITS, RANKS)
        other_base = tl.load(at_y + rows_0, mask=inside, other=0.0)
    if INTO:
        stream = tl.load(out + token * out_stride + output, mask=inside, other=0.0)
    return a, base, other_a, other_base, stream


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
