"""Sums of some rows of an expert's weight with some tokens, step by step along their inputs.

One function for each form of a weight (`expert_stacks`): numbers as they are, lanes, bytes. The
weight is the left factor of each step: its rows are many, and the matrix unit takes a left factor
from registers, where numbers were widened. Gates and what they open are rows of one tile.

Of a format that rounds inputs 8 bits are multiplied with 8 bits. Scales of groups are part of the
numbers, where bfloat16 holds them; others multiply sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import settled
from tokenpod.kernels.products.quantised.lane_widening import (
    lane_numbers,
    lane_unit,
    widened_lanes,
)
from tokenpod.kernels.products.quantised.widening import numbers_of


@triton.jit
def dense_sums(
    at_x,
    is_x,
    weight,
    own,
    k,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums [R, T] float32 of rows `own` [R] of weight [rows, k] with inputs at_x [T] of T tokens.

    Only of tokens that are there (`is_x`) is anything read; others get zeros.
    """
    at_w = weight + own * k
    sums = tl.zeros((own.shape[0], at_x.shape[0]), tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        i = start + tl.arange(0, BLOCK_K)
        w = _load(at_w[:, None] + i[None, :], (i < k)[None, :], EVEN)
        v = _inputs(at_x, is_x, i, k, EVEN)
        sums = tl.dot(w, v, sums, input_precision="ieee")
    return sums


@triton.jit
def lane_sums(
    at_x,
    is_x,
    weight,
    scale,
    own,
    rows,
    k,
    blocks,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    SCALES: tl.constexpr,
    ZEROS: tl.constexpr,
    APART: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same of a weight in `Lanes` of `rows` rows, BLOCKS of its blocks at a time."""
    LANES: tl.constexpr = BLOCKS * WIDTH
    row_lanes = blocks * WIDTH
    at_w = weight + own * row_lanes
    sums = tl.zeros((own.shape[0], at_x.shape[0]), tl.float32)
    steps = tl.cdiv(blocks, BLOCKS)
    tl.assume(steps > 0)
    for step in tl.range(0, steps, num_stages=STAGES):
        lane = step * LANES + tl.arange(0, LANES)[None, :]
        block = step * BLOCKS + tl.arange(0, BLOCKS)[None, :]
        if APART:
            # One scale after the other multiplies what its planes sum to.
            tl.static_assert(BLOCKS == 1)
            w = lane_numbers(
                at_w, scale, own, lane, step, blocks, rows, row_lanes,
                KIND, TABLE, SCALES, ZEROS, PLANES, DTYPE, ASSEMBLY, EVEN,
            )  # fmt: skip
            for plane in tl.static_range(PLANES):
                i = (step * PLANES + plane) * WIDTH + tl.arange(0, WIDTH)
                v = _inputs(at_x, is_x, i, k, EVEN)
                word = step * SCALES + plane * SCALES // PLANES
                s = tl.load(scale + word * rows + own).to(tl.float32, bitcast=True)
                sums += tl.dot(w[plane], v, input_precision="ieee") * s[:, None]
        else:
            i = step * (PLANES * LANES) + tl.arange(0, PLANES * LANES)
            v = _inputs(at_x, is_x, i, k, EVEN)
            w = widened_lanes(
                at_w, scale, own, lane, block, row_lanes, blocks, rows,
                KIND, TABLE, SCALES, ZEROS, PLANES, WIDTH, DTYPE, ASSEMBLY, EVEN,
            )  # fmt: skip
            sums = settled(tl.dot(w, v, sums, input_precision="ieee"), ASSEMBLY)
    return sums * lane_unit(KIND, ZEROS, DTYPE, ASSEMBLY)


@triton.jit
def byte_sums(
    at_x,
    is_x,
    at_their,
    weight,
    scale,
    own,
    k,
    columns,
    scale_rows,
    their_columns,
    their_tokens,
    first_own,
    apart,
    half,
    KIND: tl.constexpr,
    ROUNDED: tl.constexpr,
    SHARED: tl.constexpr,
    PER_GROUP: tl.constexpr,
    PER_THEIR: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The same of a weight [rows, k] of bytes, scale [⌈rows / scale_rows⌉, columns].

    Args:
        at_x: [T], the first input of each token: DTYPE, or bytes if ROUNDED.
        at_their: [T], the first of `their_columns` scales of each token's inputs, `their_tokens`
            apart; if ROUNDED.
        first_own: of rows that are gates, or all; those that gates open are `apart` behind it.
        half: [R], 1 for rows that gates open.
        KIND: "int8" or "fp8".
        SHARED: rows of a half share scales.
        PER_GROUP: steps of BLOCK_K inputs that share a scale; 0: a row has one.
        PER_THEIR: the same of tokens' scales.
    """
    GROUPED: tl.constexpr = PER_GROUP > 0 or PER_THEIR > 0
    SUM: tl.constexpr = tl.int32 if ROUNDED and KIND == "int8" and not GROUPED else tl.float32
    DOT: tl.constexpr = tl.int32 if ROUNDED and KIND == "int8" else tl.float32
    at_w, at_s = weight + own * k, scale + own // scale_rows * columns
    if SHARED:
        at_s = scale + first_own // scale_rows * columns
        at_up_s = scale + (first_own + apart) // scale_rows * columns
        next_up_s = tl.load(at_up_s).to(tl.float32)
        sums = tl.zeros((at_x.shape[0], own.shape[0]), SUM)
    else:
        sums = tl.zeros((own.shape[0], at_x.shape[0]), SUM)
    steps = tl.cdiv(k, BLOCK_K)
    # Scales are asked for one step ahead: they are too short to be copied beside the loop.
    next_s = _scale(at_s, 0, columns, 1, PER_GROUP, 1 if SHARED else own.shape[0])
    next_theirs = _scale(at_their, 0, their_columns, their_tokens, PER_THEIR, at_x.shape[0])
    tl.assume(steps > 0)
    for step in tl.range(0, steps, num_stages=STAGES):
        s, theirs = next_s, next_theirs
        next_s = _scale(at_s, step + 1, columns, 1, PER_GROUP, 1 if SHARED else own.shape[0])
        if SHARED:
            up_s = next_up_s
            next_up_s = _scale(at_up_s, step + 1, columns, 1, PER_GROUP, 1)
        next_theirs = _scale(
            at_their, step + 1, their_columns, their_tokens, PER_THEIR, at_x.shape[0]
        )
        i = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = numbers_of(_load(at_w[:, None] + i[None, :], (i < k)[None, :], EVEN), KIND)
        v = _inputs(at_x, is_x, i, k, EVEN)
        if ROUNDED:
            v = numbers_of(v, KIND)
        elif ASSEMBLY:
            w = w.to(DTYPE)
        else:  # the interpreter makes no bfloat16 of whole numbers
            w = w.to(tl.float32).to(DTYPE)
        if SHARED:
            # With tokens as rows, a thread has two of their scales; as columns it has dozens.
            made = tl.dot(tl.trans(v), tl.trans(w), out_dtype=DOT).to(tl.float32)
            sums += made * theirs[:, None] * tl.where(half == 1, up_s, s)[None, :]
        elif GROUPED:
            made = tl.dot(w, v, out_dtype=DOT, input_precision="ieee").to(tl.float32)
            sums += made * (s[:, None] * theirs[None, :])
        else:
            sums = tl.dot(w, v, sums, out_dtype=SUM, input_precision="ieee")
            if not ROUNDED:  # numbers were widened in registers
                sums = settled(sums, ASSEMBLY)
    sums = tl.trans(sums) if SHARED else sums
    sums = sums.to(tl.float32)
    if PER_GROUP == 0:
        sums *= tl.load(at_s).to(tl.float32)[:, None]
    if ROUNDED and PER_THEIR == 0:
        sums *= tl.load(at_their, mask=is_x, other=0.0)[None, :]
    return sums


@triton.jit
def _scale(at, step, columns, apart, PER: tl.constexpr, COUNT: tl.constexpr):
    """[COUNT] float32, of the group that a step is in; beyond the last any; PER 0: ones."""
    if PER > 0:
        s = tl.load(at + tl.minimum(step // PER, columns - 1) * apart).to(tl.float32)
    else:
        s = tl.full((COUNT,), 1.0, tl.float32)
    return s


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """Weights are read once: let them make room for what is read again."""
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _inputs(at_x, is_x, i, k, EVEN: tl.constexpr):
    """Inputs i of tokens, as a right factor [inputs, tokens]."""
    inside = is_x[None, :] if EVEN else is_x[None, :] & (i < k)[:, None]
    return tl.load(at_x[None, :] + i[:, None], mask=inside, other=0.0)
