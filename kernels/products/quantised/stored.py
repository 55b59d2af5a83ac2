"""Tiles of a weight as it is stored, on their way to the matrix unit.

`walk_stored` multiplies some rows of a weight by some tokens, whatever the weight's numbers are.
The weight is the left factor: its rows are many, and the matrix unit takes a left factor from
registers, where numbers were widened. Of 4 bits a byte has two numbers, which belong to two runs of
WIDTH inputs (planes): the low halves of a run of bytes are one tile, the high halves another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.products.quantised.widening import (
    JOINED,
    PLUS,
    TIMES,
    factor_of,
    in_pairs,
    numbers_of,
    split,
)


@triton.jit
def walk_stored(
    at_x,
    is_x,
    at_w,
    at_up,
    at_their,
    scale,
    zero,
    table,
    s_at,
    up_at,
    first,
    last,
    k,
    columns,
    their_columns,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    EVEN: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Sums [BLOCK_N, BLOCK_T] float32 (int32 of whole numbers without groups), and of `at_up`.

    Args:
        at_x: [BLOCK_T], the first input of each token: DTYPE, or bytes if ROUNDED.
        is_x: [BLOCK_T], which tokens there are.
        at_w: [BLOCK_N], the first byte of each row.
        at_up: the same of rows that gates open; with GATED.
        at_their: [BLOCK_T], the first scale of each token's inputs; with PER_THEIR.
        scale: [rows, columns], of any float type, or exponents if KIND is "mxfp4".
        zero: [rows, columns] of whole numbers; None: zero is in the middle.
        table: [16] float32, of KIND "table4".
        s_at: [BLOCK_N], where each row's scales begin; `up_at` likewise.
        first: the first step; a step has PLANES runs of WIDTH inputs.
        last: the step before which to end.
        k: inputs.
        columns: scales of a row.
        their_columns: scales of a token.
        KIND: "int8", "fp8", "int4", "mxfp4" or "table4".
        ROUNDED: inputs are of the weight's kind: bytes are multiplied as they are.
        PER_GROUP: runs that share a scale; 0: a row has one scale, which is for the caller.
        PER_THEIR: the same of tokens' scales.
    """
    GROUPED: tl.constexpr = PER_GROUP > 0 or PER_THEIR > 0
    SUM: tl.constexpr = tl.int32 if ROUNDED and KIND == "int8" and not GROUPED else tl.float32
    sums = tl.zeros((BLOCK_N, BLOCK_T), SUM)
    up_sums = tl.zeros((BLOCK_N, BLOCK_T) if GATED else (1, 1), SUM)
    # Scales are asked for one step ahead: they are too short to be copied beside the loop.
    step = tl.minimum(first, last - 1)
    next_s, next_z = _scales(scale, zero, s_at, step * PLANES, columns, PER_GROUP, BLOCK_N)
    next_s1, next_z1, next_up_s, next_up_z = next_s, next_z, next_s, next_z
    next_up_s1, next_up_z1 = next_s, next_z
    if PLANES == 2:
        next_s1, next_z1 = _scales(scale, zero, s_at, step * 2 + 1, columns, PER_GROUP, BLOCK_N)
    if GATED:
        plane = step * PLANES
        next_up_s, next_up_z = _scales(scale, zero, up_at, plane, columns, PER_GROUP, BLOCK_N)
        if PLANES == 2:
            plane += 1
            next_up_s1, next_up_z1 = _scales(scale, zero, up_at, plane, columns, PER_GROUP, BLOCK_N)
    next_theirs = _theirs(at_their, is_x, step, their_columns, PER_THEIR, BLOCK_T)
    # As in `lane_product`: without a way around the loop, multiplications need not wait.
    tl.assume(last > first)
    for step in tl.range(first, last, num_stages=STAGES):
        s, z, s1, z1, theirs = next_s, next_z, next_s1, next_z1, next_theirs
        up_s, up_z, up_s1, up_z1 = next_up_s, next_up_z, next_up_s1, next_up_z1
        ahead = tl.minimum(step + 1, last - 1)
        plane = ahead * PLANES
        next_s, next_z = _scales(scale, zero, s_at, plane, columns, PER_GROUP, BLOCK_N)
        if GATED:
            next_up_s, next_up_z = _scales(scale, zero, up_at, plane, columns, PER_GROUP, BLOCK_N)
        if PLANES == 2:
            plane += 1
            next_s1, next_z1 = _scales(scale, zero, s_at, plane, columns, PER_GROUP, BLOCK_N)
            if GATED:
                next_up_s1, next_up_z1 = _scales(
                    scale, zero, up_at, plane, columns, PER_GROUP, BLOCK_N
                )
        next_theirs = _theirs(at_their, is_x, ahead, their_columns, PER_THEIR, BLOCK_T)
        byte = step * WIDTH + tl.arange(0, WIDTH)
        i = step * (PLANES * WIDTH) + tl.arange(0, WIDTH)
        v = _inputs(at_x, i, k, is_x, EVEN)
        v1 = _inputs(at_x, i + WIDTH, k, is_x, EVEN) if PLANES == 2 else v
        for part in tl.static_range(2 if GATED else 1):
            # Rows of two planes are filled up with zeros; others end where inputs do.
            packed = _bytes(at_up if part else at_w, byte, k, EVEN or PLANES == 2)
            own_s, own_z = (up_s, up_z) if part else (s, z)
            made = up_sums if part else sums
            if ROUNDED:
                made = _add_rounded(made, packed, v, own_s, theirs, KIND, GROUPED, PER_GROUP, SUM)
            else:
                w, w1 = split(packed, table, KIND, DTYPE, ASSEMBLY)
                made = _add(made, w, v, own_s, own_z, KIND, DTYPE, PER_GROUP > 0, ASSEMBLY)
                if PLANES == 2:
                    own_s, own_z = (up_s1, up_z1) if part else (s1, z1)
                    made = _add(made, w1, v1, own_s, own_z, KIND, DTYPE, PER_GROUP > 0, ASSEMBLY)
            if part:
                up_sums = made
            else:
                sums = made
    return sums, up_sums


@triton.jit
def row_scales(scale, at, PER_GROUP: tl.constexpr):
    """Of rows [BLOCK_N, 1] that have one each; 1 where groups had theirs."""
    if PER_GROUP > 0:
        return 1.0
    else:
        return tl.load(scale + at).to(tl.float32)[:, None]


@triton.jit
def _scales(scale, zero, at, plane, columns, PER_GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """As stored, of the group that a run of inputs is in; inputs beyond the last have any."""
    if PER_GROUP > 0:
        column = tl.minimum(plane // PER_GROUP, columns - 1)
        s = tl.load(scale + at + column)
        if zero is not None:
            z = tl.load(zero + at + column)
        else:
            z = tl.zeros((BLOCK_N,), tl.int8)
    else:
        s = tl.zeros((BLOCK_N,), tl.float32)
        z = tl.zeros((BLOCK_N,), tl.int8)
    return s, z


@triton.jit
def _theirs(at, is_x, step, columns, PER_THEIR: tl.constexpr, BLOCK_T: tl.constexpr):
    if PER_THEIR > 0:
        theirs = tl.load(at + tl.minimum(step // PER_THEIR, columns - 1), mask=is_x, other=0.0)
    else:
        theirs = tl.full((BLOCK_T,), 1.0, tl.float32)
    return theirs


@triton.jit
def _bytes(at_row, byte, k, EVEN: tl.constexpr):
    """Weights are read once: let them make room for what is read again."""
    at = at_row[:, None] + byte[None, :]
    if EVEN:
        packed = tl.load(at, eviction_policy="evict_first")
    else:
        packed = tl.load(at, mask=(byte < k)[None, :], other=0.0, eviction_policy="evict_first")
    return packed


@triton.jit
def _inputs(at_x, i, k, is_x, EVEN: tl.constexpr):
    """Inputs i of tokens, as a right factor [inputs, tokens]."""
    inside = is_x[None, :] if EVEN else is_x[None, :] & (i < k)[:, None]
    return tl.load(at_x[None, :] + i[:, None], mask=inside, other=0.0)


@triton.jit
def _add_rounded(
    sums,
    packed,
    v,
    s,
    theirs,
    KIND: tl.constexpr,
    GROUPED: tl.constexpr,
    PER_GROUP: tl.constexpr,
    SUM: tl.constexpr,
):
    """Sums plus numbers of 8 bits times such."""
    w = numbers_of(packed, KIND)
    v = numbers_of(v, KIND)
    if GROUPED:
        kind = tl.float32 if KIND == "fp8" else tl.int32
        dot = tl.dot(w, v, out_dtype=kind).to(tl.float32) * theirs[None, :]
        if PER_GROUP > 0:
            dot *= s.to(tl.float32)[:, None]
        sums += dot
    else:
        sums = tl.dot(w, v, sums, out_dtype=SUM)
    return sums


@triton.jit
def _add(
    sums,
    w,
    v,
    s,
    z,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUPED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Sums plus a tile of the weight, as `split` left it, times inputs."""
    FAST: tl.constexpr = ASSEMBLY and tl.bfloat16 == DTYPE
    # A scale that inputs' type does not hold would be rounded: it multiplies what is summed.
    AFTER: tl.constexpr = GROUPED and KIND != "mxfp4" and s.dtype != DTYPE
    factor = factor_of(s, KIND)
    if GROUPED and (KIND == "int4" or KIND == "int8"):
        offset = z.to(tl.float32) + (JOINED if FAST and KIND == "int4" else 0.0)
        if KIND == "int4":
            offset += 8.0
        if FAST:
            w = in_pairs(w, -offset, PLUS)
        else:
            w -= offset[:, None]
    if AFTER:
        return sums + tl.dot(w.to(DTYPE), v, input_precision="ieee") * factor[:, None]
    if GROUPED:
        if FAST:
            w = in_pairs(w, factor, TIMES)
        else:
            w *= factor[:, None]
    return tl.dot(w.to(DTYPE), v, sums, input_precision="ieee")
