"""Products of tokens as numbers of 8 bits with a weight of 8 bits, on the matrix unit.

The weight is the left factor: its rows are many. Nothing is widened before it is multiplied: bytes
go from memory to the matrix unit as they are. Sums of whole numbers are exact; scales multiply them
row by row, or block by block where a row has several.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.quantised.parts import sum_parts, write_tile
from tokenpod.kernels.products.quantised.widening import numbers_of


@launched
@triton.jit(do_not_specialize=["tokens"])
def multiply_rounded(
    x,
    x_scale,
    weight,
    scale,
    bias,
    y,
    y_stride,
    tokens,
    n,
    width,
    scale_columns,
    scale_rows,
    steps_in_group,
    their_columns,
    steps_in_theirs,
    KIND: tl.constexpr,
    GROUPED: tl.constexpr,
    SHARED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    WRITTEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PANEL: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    KIND "fp8" or "int8". GROUPED: scale [⌈n / scale_rows⌉, scale_columns], a column for
    steps_in_group steps; x_scale [their_columns, tokens], one for steps_in_theirs. SHARED: all rows
    of a tile are of one block. DESCRIBED: x and weight are descriptors; WRITTEN: y is.
    SPLITS programs share a row; they leave partial sums [SPLITS, tokens, n] float32. Programs of
    PANEL blocks of rows walk over tokens side by side. Rows of a tile are [PARTS, BLOCK_N], columns
    [PARTS, BLOCK_T]: see `parts`.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    ALL: tl.constexpr = PARTS * BLOCK_N
    blocks_n = tl.cdiv(n, BLOCK_N)
    blocks_t = tl.cdiv(tokens, BLOCK_T)
    panel = tl.program_id(0) // (PANEL * blocks_t)
    first_block = panel * PANEL
    blocks_in_panel = tl.minimum(blocks_n - first_block, PANEL)
    in_panel = tl.program_id(0) % (PANEL * blocks_t)
    block_n = first_block + in_panel % blocks_in_panel
    block_t = in_panel // blocks_in_panel
    tile_row, column = tl.arange(0, ALL), tl.arange(0, COLUMNS)
    row_part, part = tile_row // BLOCK_N, column // BLOCK_T
    own = tl.minimum(block_n * BLOCK_N + tile_row % BLOCK_N, n - 1)
    token = block_t * BLOCK_T + column % BLOCK_T
    is_token = (token < tokens) & (part < PARTS)
    share = tl.cdiv(tl.cdiv(width, BLOCK_K), PARTS * SPLITS)
    first_of_row = (tl.program_id(1) * PARTS + row_part) * share
    first = (tl.program_id(1) * PARTS + part) * share
    gate_scale = own // scale_rows * scale_columns
    up_scale = (own + n) // scale_rows * scale_columns
    first_row, first_token = block_n * BLOCK_N, block_t * BLOCK_T
    if not DESCRIBED:
        start_of_row = weight + own.to(tl.int64) * width
        start_of_up = weight + (own + n).to(tl.int64) * width
        at_x = x + token.to(tl.int64) * width
    await_inputs(OVERLAP)

    SUM: tl.constexpr = tl.int32 if KIND == "int8" else tl.float32
    tl.static_assert(KIND == "fp8" or not GROUPED)
    sums = tl.zeros((COLUMNS, ALL) if SHARED else (ALL, COLUMNS), SUM)
    up_sums = tl.zeros((1, 1), SUM)
    if GATED:
        up_sums = tl.zeros((COLUMNS, ALL) if SHARED else (ALL, COLUMNS), SUM)
    # What multiplies a step's sums is asked for one step ahead: it would be waited for.
    last, last_of_theirs = scale_columns - 1, their_columns - 1
    at_theirs = x_scale + token
    next_theirs = tl.zeros((COLUMNS,), tl.float32)
    next_s = tl.zeros((1,) if SHARED else (ALL,), tl.float32)
    next_up_s = next_s
    first_step = tl.program_id(1) * share
    if SHARED:
        tl.static_assert(PARTS == 1)
        at_s = scale + first_row // scale_rows * scale_columns
        at_up_s = scale + (first_row + n) // scale_rows * scale_columns
    else:
        at_s, at_up_s = scale + gate_scale, scale + up_scale
    if GROUPED:
        of_rows = first_step if SHARED else first_of_row
        group = tl.minimum(of_rows // steps_in_group, last)
        of_x = tl.minimum(first // steps_in_theirs, last_of_theirs)
        next_theirs = tl.load(at_theirs + of_x * tokens, mask=is_token, other=0.0)
        next_s = tl.load(at_s + group).to(tl.float32)
        next_up_s = tl.load(at_up_s + group).to(tl.float32) if GATED else next_s
    for step in tl.range(0, share, num_stages=STAGES):
        theirs, s, up_s = next_theirs, next_s, next_up_s
        if GROUPED:
            of_x = tl.minimum((first + step + 1) // steps_in_theirs, last_of_theirs)
            next_theirs = tl.load(at_theirs + of_x * tokens, mask=is_token, other=0.0)
            group = tl.minimum((of_rows + step + 1) // steps_in_group, last)
            next_s = tl.load(at_s + group).to(tl.float32)
            next_up_s = tl.load(at_up_s + group).to(tl.float32) if GATED else next_s
        if DESCRIBED:
            # Beyond the last input, token and row it gives zeros.
            at = (first_step + step) * BLOCK_K
            v = numbers_of(tl.trans(x.load([first_token, at])), KIND)
            w = numbers_of(weight.load([first_row, at]), KIND)
            up = numbers_of(weight.load([first_row + n, at]), KIND) if GATED else w
        else:
            i = ((first + step) * BLOCK_K)[None, :] + tl.arange(0, BLOCK_K)[:, None]
            v = numbers_of(_columns(at_x, i, width, is_token, EVEN), KIND)
            byte = ((first_of_row + step) * BLOCK_K)[:, None] + tl.arange(0, BLOCK_K)[None, :]
            w = numbers_of(_rows(start_of_row, byte, width, EVEN), KIND)
            up = numbers_of(_rows(start_of_up, byte, width, EVEN), KIND) if GATED else w
        if GROUPED and SHARED:
            # With tokens as rows, a thread has two of their scales; as columns it has dozens.
            sums += tl.dot(tl.trans(v), tl.trans(w)) * (s * theirs)[:, None]
            if GATED:
                up_sums += tl.dot(tl.trans(v), tl.trans(up)) * (up_s * theirs)[:, None]
        elif GROUPED:
            sums += tl.dot(w, v) * (s[:, None] * theirs[None, :])
            if GATED:
                up_sums += tl.dot(up, v) * (up_s[:, None] * theirs[None, :])
        else:
            sums = tl.dot(w, v, sums, out_dtype=SUM)
            if GATED:
                up_sums = tl.dot(up, v, up_sums, out_dtype=SUM)

    if SHARED:
        sums, up_sums = tl.trans(sums), tl.trans(up_sums)
    out = _scaled(sums, x_scale, scale + gate_scale, token, is_token, GROUPED)
    out = sum_parts(out, row_part, part, 1, PARTS, BLOCK_N, BLOCK_T)
    out = tl.reshape(out, (BLOCK_N, BLOCK_T))
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (token < tokens)[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        tl.static_assert(not GATED)
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, out, mask=inside)
    else:
        own = tl.minimum(row, n - 1)
        if bias is not None:
            out += tl.load(bias + own).to(tl.float32)[:, None]
        if GATED:
            column_token = block_t * BLOCK_T + column % BLOCK_T
            up_out = _scaled(up_sums, x_scale, scale + up_scale, column_token, is_token, GROUPED)
            up_out = sum_parts(up_out, row_part, part, 1, PARTS, BLOCK_N, BLOCK_T)
            up_out = tl.reshape(up_out, (BLOCK_N, BLOCK_T))
            if bias is not None:
                up_out += tl.load(bias + n + own).to(tl.float32)[:, None]
            out = gated_unit(out, up_out, ACTIVATION)
        if WRITTEN:
            write_tile(out, y, first_row, first_token, ADD)
        else:
            at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
            out = out.to(y.dtype.element_ty)
            if ADD:
                out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
            tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(sums, x_scale, row_scale, token, is_token, GROUPED: tl.constexpr):
    """Float32 sums with the scales that they lack yet."""
    out = sums.to(tl.float32)
    if not GROUPED:
        out *= tl.load(row_scale).to(tl.float32)[:, None]
        out *= tl.load(x_scale + token, mask=is_token, other=0.0)[None, :]
    return out


@triton.jit
def _rows(start_of_row, byte, width, EVEN: tl.constexpr):
    """Numbers of rows, at their own places [rows, BLOCK_K]."""
    at = start_of_row[:, None] + byte
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=byte < width, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _columns(at_x, i, width, is_token, EVEN: tl.constexpr):
    """Inputs of tokens, at their own places, as a right factor [BLOCK_K, columns]."""
    inside = is_token[None, :] if EVEN else is_token[None, :] & (i < width)
    return tl.load(at_x[None, :] + i, mask=inside, other=0.0)
