"""Products of tokens as numbers of 8 bits with a weight of 8 or 4, on the matrix unit.

The weight is the left factor: its rows are many. Nothing is widened before it is multiplied: bytes
go from memory to the matrix unit as they are, and of 4 bits the nibbles are split, four at a time,
by a mask and a shift. Sums of whole numbers are exact; scales multiply them row by row, or group by
group where a row has several.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.launch import await_inputs
from tokenpod.kernels.triton.pointwise import gated_unit
from tokenpod.kernels.triton.product_kernels import ask_rows


@triton.jit(do_not_specialize=["tokens"])
def multiply_rounded(
    x,
    x_scale,
    x_sums,
    weight,
    scale,
    zero,
    bias,
    y,
    y_stride,
    tokens,
    n,
    width,
    row_bytes,
    scale_columns,
    scale_rows,
    steps_in_group,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    GROUPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PANEL: tl.constexpr,
    STAGES: tl.constexpr,
    UNROLL: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    KIND "fp8", "int8" or "int4": then BLOCK_K is a block's inputs, and half as many bytes. GROUPED:
    scale [⌈n / scale_rows⌉, scale_columns], a column for steps_in_group steps; x_scale has as many
    columns as it has if it is "fp8", else one. SPLITS programs share a row; they leave partial sums
    [SPLITS, tokens, n] float32. Programs of PANEL blocks of rows walk over tokens side by side.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    WHOLE: tl.constexpr = KIND != "fp8"
    ROW_BLOCK: tl.constexpr = BLOCK_K // 2 if KIND == "int4" else BLOCK_K
    blocks_n = tl.cdiv(n, BLOCK_N)
    blocks_t = tl.cdiv(tokens, BLOCK_T)
    panel = tl.program_id(0) // (PANEL * blocks_t)
    first_block = panel * PANEL
    blocks_in_panel = tl.minimum(blocks_n - first_block, PANEL)
    in_panel = tl.program_id(0) % (PANEL * blocks_t)
    row = (first_block + in_panel % blocks_in_panel) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = in_panel // blocks_in_panel * BLOCK_T + tl.arange(0, BLOCK_T)
    own = tl.minimum(row, n - 1)
    start_of_row = weight + own.to(tl.int64) * row_bytes
    start_of_up = weight + (own + n).to(tl.int64) * row_bytes
    gate_scale = own // scale_rows * scale_columns
    up_scale = (own + n) // scale_rows * scale_columns
    at_x = x + token.to(tl.int64) * width
    at_low = at_x + tokens.to(tl.int64) * width
    is_token = token < tokens
    steps = tl.cdiv(width, BLOCK_K)
    first = 0
    if SPLITS > 1:
        steps = tl.cdiv(steps, SPLITS)
        first = tl.program_id(1) * steps
    last = tl.minimum(first + steps, tl.cdiv(width, BLOCK_K))
    # Weights do not depend on the kernel before: they are asked into the L2 cache meanwhile.
    first_row = (first_block + in_panel % blocks_in_panel) * BLOCK_N
    ask_rows(weight, first_row, n, first * ROW_BLOCK, row_bytes, BLOCK_N, AHEAD)
    if GATED:
        ask_rows(weight, first_row + n, 2 * n, 0, row_bytes, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)

    # Digits of a row with one scale are summed apart, as whole numbers; everything else at once.
    APART: tl.constexpr = WHOLE and not GROUPED
    SUM: tl.constexpr = tl.int32 if APART else tl.float32
    sums = tl.zeros((BLOCK_N, BLOCK_T), SUM)
    low_sums = tl.zeros((BLOCK_N, BLOCK_T) if APART and DIGITS == 2 else (1, 1), SUM)
    up_sums = tl.zeros((BLOCK_N, BLOCK_T) if GATED else (1, 1), SUM)
    low_up_sums = tl.zeros((BLOCK_N, BLOCK_T) if GATED and APART and DIGITS == 2 else (1, 1), SUM)
    # What multiplies a step's sums is asked for one step ahead: it would be waited for.
    blocks = tl.cdiv(width, BLOCK_K)
    at_sums = x_sums + token * blocks if KIND == "int4" else x_scale + token * scale_columns
    next_theirs = tl.zeros((BLOCK_T,), tl.float32)
    next_s = tl.zeros((BLOCK_N,), tl.float32)
    next_up_s, next_z, next_up_z = next_s, next_s, next_s
    if GROUPED:
        group = first // steps_in_group
        at_theirs = first if KIND == "int4" else group
        next_theirs = tl.load(at_sums + at_theirs, mask=is_token, other=0.0)
        next_s = tl.load(scale + gate_scale + group).to(tl.float32)
        next_up_s = tl.load(scale + up_scale + group).to(tl.float32) if GATED else next_s
        next_z = _zeros(zero, gate_scale + group, BLOCK_N)
        next_up_z = _zeros(zero, up_scale + group, BLOCK_N) if GATED else next_z
    for step in tl.range(first, last, num_stages=STAGES, loop_unroll_factor=UNROLL):
        theirs, s, up_s, z, up_z = next_theirs, next_s, next_up_s, next_z, next_up_z
        if GROUPED:
            ahead = tl.minimum(step + 1, last - 1)
            group = ahead // steps_in_group
            at_theirs = ahead if KIND == "int4" else group
            next_theirs = tl.load(at_sums + at_theirs, mask=is_token, other=0.0)
            next_s = tl.load(scale + gate_scale + group).to(tl.float32)
            next_up_s = tl.load(scale + up_scale + group).to(tl.float32) if GATED else next_s
            next_z = _zeros(zero, gate_scale + group, BLOCK_N)
            next_up_z = _zeros(zero, up_scale + group, BLOCK_N) if GATED else next_z
        if KIND == "int4":
            HALF: tl.constexpr = BLOCK_K // 2
            i = step * BLOCK_K + tl.arange(0, HALF)
            byte = step * HALF + tl.arange(0, HALF)
            v = _columns(at_x, i, width, is_token, True)
            v_high = _columns(at_x, i + HALF, width, is_token, True)
            low = _columns(at_low, i, width, is_token, True) if DIGITS == 2 else v
            low_high = _columns(at_low, i + HALF, width, is_token, True) if DIGITS == 2 else v
            for part in tl.static_range(2 if GATED else 1):
                packed = tl.load(
                    (start_of_up if part else start_of_row)[:, None] + byte[None, :],
                    eviction_policy="evict_first",
                )
                even, odd = _nibbles(packed, ASSEMBLY)
                dot = tl.dot(even, v, out_dtype=tl.int32)
                dot = tl.dot(odd, v_high, dot, out_dtype=tl.int32)
                if DIGITS == 2:
                    low_dot = tl.dot(even, low, out_dtype=tl.int32)
                    low_dot = tl.dot(odd, low_high, low_dot, out_dtype=tl.int32)
                    dot = dot * 128 + low_dot
                own_s, own_z = (up_s, up_z) if part else (s, z)
                whole = dot.to(tl.float32) - own_z[:, None] * theirs[None, :]
                if part:
                    up_sums += own_s[:, None] * whole
                else:
                    sums += own_s[:, None] * whole
        else:
            i = step * BLOCK_K + tl.arange(0, BLOCK_K)
            v = _numbers(_columns(at_x, i, width, is_token, EVEN), KIND)
            low = _columns(at_low, i, width, is_token, EVEN) if DIGITS == 2 else v
            w = _numbers(_rows(start_of_row, i, width, EVEN), KIND)
            up = _numbers(_rows(start_of_up, i, width, EVEN), KIND) if GATED else w
            if GROUPED:
                sums += tl.dot(w, v) * (s[:, None] * theirs[None, :])
                if GATED:
                    up_sums += tl.dot(up, v) * (up_s[:, None] * theirs[None, :])
            else:
                sums = tl.dot(w, v, sums, out_dtype=SUM)
                if DIGITS == 2:
                    low_sums = tl.dot(w, low, low_sums, out_dtype=SUM)
                if GATED:
                    up_sums = tl.dot(up, v, up_sums, out_dtype=SUM)
                    if DIGITS == 2:
                        low_up_sums = tl.dot(up, low, low_up_sums, out_dtype=SUM)

    out = _scaled(
        sums,
        low_sums,
        x_scale,
        scale + gate_scale,
        token,
        is_token,
        APART and DIGITS == 2,
        GROUPED,
        KIND,
    )
    inside = is_token[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        tl.static_assert(not GATED)
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, out, mask=inside)
    else:
        if bias is not None:
            out += tl.load(bias + own).to(tl.float32)[:, None]
        if GATED:
            up_out = _scaled(
                up_sums,
                low_up_sums,
                x_scale,
                scale + up_scale,
                token,
                is_token,
                APART and DIGITS == 2,
                GROUPED,
                KIND,
            )
            if bias is not None:
                up_out += tl.load(bias + n + own).to(tl.float32)[:, None]
            out = gated_unit(out, up_out, ACTIVATION)
        at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _zeros(zero, at, BLOCK_N: tl.constexpr):
    """Of groups of rows; 8 where a weight has none of its own."""
    if zero is None:
        return tl.full((BLOCK_N,), 8.0, tl.float32)
    else:
        return tl.load(zero + at).to(tl.float32)


@triton.jit
def _scaled(
    sums,
    low_sums,
    x_scale,
    row_scale,
    token,
    is_token,
    DIGITS: tl.constexpr,
    GROUPED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Float32 sums with the scales that they lack yet."""
    out = sums.to(tl.float32)
    if DIGITS:
        out = out * 128.0 + low_sums.to(tl.float32)
    if not GROUPED:
        out *= tl.load(row_scale).to(tl.float32)[:, None]
    if not GROUPED or KIND == "int4":
        out *= tl.load(x_scale + token, mask=is_token, other=0.0)[None, :]
    return out


@triton.jit
def _numbers(loaded, KIND: tl.constexpr):
    """Bytes are loaded as whole numbers, whatever they are."""
    return loaded.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else loaded


@triton.jit
def _rows(start_of_row, i, width, EVEN: tl.constexpr):
    at = start_of_row[:, None] + i[None, :]
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=(i < width)[None, :], other=0, eviction_policy="evict_first")
    return w


@triton.jit
def _columns(at_x, i, width, is_token, EVEN: tl.constexpr):
    """Inputs i of tokens, as a right factor [inputs, tokens]."""
    inside = is_token[None, :] if EVEN else is_token[None, :] & (i < width)[:, None]
    return tl.load(at_x[None, :] + i[:, None], mask=inside, other=0)


@triton.jit
def _nibbles(packed, ASSEMBLY: tl.constexpr):
    """The low and the high halves of bytes, as int8 within 0 to 15."""
    if ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(
            """{
            .reg .b32 high;
            shr.b32 high, $2, 4;
            and.b32 $0, $2, 0x0F0F0F0F;
            and.b32 $1, high, 0x0F0F0F0F;
            }""",
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        even = packed & 15
        odd = (packed >> 4) & 15
    return even, odd
