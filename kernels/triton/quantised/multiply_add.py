"""Products of a handful of tokens with a weight of 8 or 4 bits, bound by reading it.

As `product_kernels.multiply_add`: a program has BLOCK_N rows of the weight and walks along them in
ordinary arithmetic, each number widened in registers; it can norm its input on the way, apply the
gate, and add to the residual. What differs is how a tile of the weight is read.

4 bits: a word holds 8 inputs. Masked where they stand and joined with the exponent that makes the
lowest of these bits stand for 1, they are floats already, but for that exponent's own value: 128 at
bits 16 to 19, 2048 at bits 12 to 15. Its sum over the inputs is the same for all rows and is taken
off word by word, the group's zero with it. So a number costs a mask, a sum, and half a shift.

Inputs that the format rounds are rounded here too, once the largest of the token is known.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.launch import await_inputs
from tokenpod.kernels.triton.pointwise import gated_unit

#: The exponents that make floats of bits 12 to 15, and of bits 16 to 19.
LOW_EXPONENT: tl.constexpr = tl.constexpr(0x45000000)
HIGH_EXPONENT: tl.constexpr = tl.constexpr(0x43000000)
LOW_OFFSET: tl.constexpr = tl.constexpr(2048.0)
HIGH_OFFSET: tl.constexpr = tl.constexpr(128.0)
FP8_MOST: tl.constexpr = tl.constexpr(448.0)
INT8_MOST: tl.constexpr = tl.constexpr(127.0)


@triton.jit(do_not_specialize=["tokens"])
def multiply_add_bytes(
    x,
    weight,
    scale,
    bias,
    delta,
    norm_weight,
    static,
    y,
    x_stride,
    delta_stride,
    y_stride,
    tokens,
    n,
    k,
    epsilon,
    scale_columns,
    scale_rows,
    group_columns,
    FP8: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x [tokens, k] · weightᵀ, gates first with ACTIVATION.

    The weight's bytes are e4m3 with FP8, else whole numbers.

    ROUNDED: "none", "fp8" or "int8". GROUPED: a scale [⌈n / scale_rows⌉, scale_columns] for every
    group_columns inputs, a multiple of BLOCK_K; inputs are then rounded in the same groups.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    NORM: tl.constexpr = norm_weight is not None
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    start_of_row = weight + own.to(tl.int64)[None, :, None] * k
    start_of_up = weight + (own + n).to(tl.int64)[None, :, None] * k
    # A thread has 8 bytes, and as many inputs: so nothing changes its layout.
    i = tl.max_contiguous(tl.arange(0, BLOCK_K), 8)[None, None, :]
    token = tl.arange(0, BLOCK_T)[:, None, None]
    at_x = x + token * x_stride
    sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_K), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCK_K) if GATED else (1, 1, 1), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_K) if NORM else (1, 1, 1), tl.float32)
    gate_scale = own // scale_rows * scale_columns
    up_scale = (own + n) // scale_rows * scale_columns

    next_w = _tile(start_of_row + i, i < k)
    next_up = _tile(start_of_up + i, i < k) if GATED else next_w
    await_inputs(OVERLAP)
    inverse = 1.0
    step = 1.0
    if ROUNDED != "none" and not GROUPED:
        step, inverse = _token_scale(
            at_x, norm_weight, static, token < tokens, k, epsilon, ROUNDED, BLOCK_T, BLOCK_K
        )
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = start + i
        # The next tile is on its way while this one is multiplied.
        w, up = next_w, next_up
        next_w = _tile(start_of_row + at + BLOCK_K, at + BLOCK_K < k)
        next_up = _tile(start_of_up + at + BLOCK_K, at + BLOCK_K < k) if GATED else next_w
        v = _inputs(at_x, norm_weight, at, token < tokens, k, EVEN and BLOCK_T == 1)
        if NORM and (ROUNDED == "none" or GROUPED):
            raw = _inputs(at_x, None, at, token < tokens, k, EVEN and BLOCK_T == 1)
            squares += raw * raw
        if GROUPED:
            group = start // group_columns
            if ROUNDED != "none":
                largest = tl.max(tl.abs(v), axis=2, keep_dims=True)
                lost = tl.sum(v * 0.0, axis=2, keep_dims=True)
                group_step = largest / FP8_MOST + lost
                v = _rounded(v * tl.where(group_step > 0, 1.0 / group_step, 1.0), ROUNDED)
                v *= group_step
            own_scale = tl.load(scale + gate_scale + group)[None, :, None]
            sums += (v * own_scale) * _wide(w, FP8)
            if GATED:
                their_scale = tl.load(scale + up_scale + group)[None, :, None]
                up_sums += (v * their_scale) * _wide(up, FP8)
        else:
            if ROUNDED != "none":
                v = _rounded(v * inverse, ROUNDED)
            sums += v * _wide(w, FP8)
            if GATED:
                up_sums += v * _wide(up, FP8)

    token = tl.arange(0, BLOCK_T)
    factor = tl.full((BLOCK_T, 1), 1.0, tl.float32)
    if ROUNDED != "none" and not GROUPED:
        factor = tl.reshape(step, (BLOCK_T, 1))
    elif NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=2) / k + epsilon)
    out = tl.sum(sums, axis=2) * factor
    up_out = tl.sum(up_sums, axis=2) * factor if GATED else out
    if not GROUPED:
        out *= tl.load(scale + gate_scale)[None, :]
        if GATED:
            up_out *= tl.load(scale + up_scale)[None, :]
    _finish(
        out, up_out, bias, delta, y, delta_stride, y_stride, tokens, n, row, token, ACTIVATION, ADD
    )


@triton.jit(do_not_specialize=["tokens"])
def multiply_add_words(
    x,
    weight,
    scale,
    zero,
    bias,
    delta,
    norm_weight,
    y,
    x_stride,
    delta_stride,
    y_stride,
    tokens,
    n,
    k,
    epsilon,
    blocks,
    blocks_in_group,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As above, of a weight of 4 bits: words [n, blocks · RUN] int32, blocks of 8 · RUN inputs.

    Scale and zero [n, ⌈blocks / blocks_in_group⌉]; without a zero it is 8. A tile is BLOCKS blocks.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    NORM: tl.constexpr = norm_weight is not None
    IN_BLOCK: tl.constexpr = 8 * RUN
    # Axes: token, row, block, word of the block.
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    groups = tl.cdiv(blocks, blocks_in_group)
    rows = own.to(tl.int64)[None, :, None, None]
    block = tl.arange(0, BLOCKS)[None, None, :, None]
    # A thread has 4 words, and as many inputs at a time: so nothing changes its layout.
    lane = tl.max_contiguous(tl.arange(0, RUN), 4)[None, None, None, :]
    token = tl.arange(0, BLOCK_T)[:, None, None, None]
    at_x = x + token * x_stride
    sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCKS, RUN), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_N, BLOCKS, RUN) if GATED else (1, 1, 1, 1), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCKS, RUN) if NORM else (1, 1, 1, 1), tl.float32)
    start_of_row = weight + rows * (blocks * RUN)
    start_of_up = start_of_row + n.to(tl.int64) * (blocks * RUN)

    next_w = _tile(start_of_row + block * RUN + lane, block < blocks)
    next_up = _tile(start_of_up + block * RUN + lane, block < blocks) if GATED else next_w
    await_inputs(OVERLAP)
    for start in tl.range(0, blocks, BLOCKS, num_stages=STAGES):
        at = start + block
        there = at < blocks
        # The next tile is on its way while this one is multiplied.
        w, up = next_w, next_up
        ahead = at + BLOCKS
        next_w = _tile(start_of_row + ahead * RUN + lane, ahead < blocks)
        next_up = _tile(start_of_up + ahead * RUN + lane, ahead < blocks) if GATED else next_w
        at_scale = rows * groups + at // blocks_in_group
        s = _tile(scale + at_scale, there).to(tl.float32)
        dot = tl.zeros((BLOCK_T, BLOCK_N, BLOCKS, RUN), tl.float32)
        up_dot = tl.zeros((BLOCK_T, BLOCK_N, BLOCKS, RUN) if GATED else (1, 1, 1, 1), tl.float32)
        total = tl.zeros((BLOCK_T, 1, BLOCKS, RUN), tl.float32)
        offset = tl.zeros((BLOCK_T, 1, BLOCKS, RUN), tl.float32)
        for place in tl.static_range(8):
            i = at * IN_BLOCK + place * RUN + lane
            inside = (token < tokens) & (i < k)
            v = tl.load(at_x + i, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                squares += v * v
                v *= tl.load(norm_weight + i, mask=i < k, other=0.0).to(tl.float32)
            total += v
            offset += v * (LOW_OFFSET if place % 2 == 0 else HIGH_OFFSET)
            dot += v * _float_at(w, place, ASSEMBLY)
            if GATED:
                up_dot += v * _float_at(up, place, ASSEMBLY)
        if zero is None:
            sums += s * (dot - (offset + 8.0 * total))
        else:
            z = _tile(zero + at_scale, there).to(tl.float32)
            sums += s * (dot - offset - z * total)
        if GATED:
            at_scale += n.to(tl.int64) * groups
            s = _tile(scale + at_scale, there).to(tl.float32)
            if zero is None:
                up_sums += s * (up_dot - (offset + 8.0 * total))
            else:
                z = _tile(zero + at_scale, there).to(tl.float32)
                up_sums += s * (up_dot - offset - z * total)

    token = tl.arange(0, BLOCK_T)
    out = tl.sum(tl.sum(sums, axis=3), axis=2)
    up_out = tl.sum(tl.sum(up_sums, axis=3), axis=2) if GATED else out
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=3), axis=2) / k + epsilon)
        out *= factor
        if GATED:
            up_out *= factor
    _finish(
        out, up_out, bias, delta, y, delta_stride, y_stride, tokens, n, row, token, ACTIVATION, ADD
    )


@triton.jit
def _float_at(words, PLACE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The number at a place 0 to 7 of words, plus its offset, as a float."""
    # Pairs of places come to bits 12 to 19 by one shift.
    if PLACE < 2:
        shifted = words << 12
    elif PLACE < 4:
        shifted = words << 4
    elif PLACE < 6:
        shifted = words >> 4
    else:
        shifted = words >> 12
    MASK: tl.constexpr = 0x0000F000 if PLACE % 2 == 0 else 0x000F0000
    EXPONENT: tl.constexpr = LOW_EXPONENT if PLACE % 2 == 0 else HIGH_EXPONENT
    if ASSEMBLY:
        # One instruction takes one constant: the exponent has to be in a register.
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [shifted, MASK, tl.full(shifted.shape, EXPONENT, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = (shifted & MASK) | EXPONENT
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _token_scale(
    at_x,
    norm_weight,
    static,
    is_token,
    k,
    epsilon,
    ROUNDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A token's scale [T, 1, 1], and what its inputs are multiplied by to be rounded."""
    i = tl.arange(0, BLOCK_K)[None, None, :]
    largest = tl.zeros((BLOCK_T, 1, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_K), tl.float32)
    lost = tl.zeros((BLOCK_T, 1, BLOCK_K), tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        v = _inputs(at_x, None, start + i, is_token, k, False)
        squares += v * v
        if norm_weight is not None:
            v *= tl.load(norm_weight + start + i, mask=start + i < k, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(v))
        # A number that is none gets lost in a maximum; times zero it stays what it is.
        lost += v * 0.0
    most = tl.max(largest, axis=2, keep_dims=True) + tl.sum(lost, axis=2, keep_dims=True)
    factor = tl.full((BLOCK_T, 1, 1), 1.0, tl.float32)
    if norm_weight is not None:
        factor = tl.rsqrt(tl.sum(squares, axis=2, keep_dims=True) / k + epsilon)
    if static is None:
        step = most * factor / (FP8_MOST if ROUNDED == "fp8" else INT8_MOST)
    else:
        step = tl.load(static) + 0.0 * most
    return step, tl.where(step > 0, factor / step, 1.0)


@triton.jit
def _rounded(v, ROUNDED: tl.constexpr):
    """To the nearest number of the format, as float32."""
    if ROUNDED == "fp8":
        v = tl.minimum(tl.maximum(v, -FP8_MOST), FP8_MOST)
        return v.to(tl.float8e4nv).to(tl.float32)
    else:
        # Adding and taking off 1.5 · 2²³ leaves the nearest whole number, ties to even.
        v = tl.minimum(tl.maximum(v, -INT8_MOST), INT8_MOST)
        return v + 12582912.0 - 12582912.0


@triton.jit
def _tile(at, inside):
    """Weights are read once: let them make room for what is read again."""
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _wide(w, FP8: tl.constexpr):
    return w.to(tl.float8e4nv, bitcast=True).to(tl.float32) if FP8 else w.to(tl.float32)


@triton.jit
def _inputs(at_x, norm_weight, at, is_token, k, FULL: tl.constexpr):
    """Inputs `at`, float32, times the norm's weight."""
    if FULL:
        v = tl.load(at_x + at).to(tl.float32)
    else:
        v = tl.load(at_x + at, mask=is_token & (at < k), other=0.0).to(tl.float32)
    if norm_weight is not None:
        v *= tl.load(norm_weight + at, mask=at < k, other=0.0).to(tl.float32)
    return v


@triton.jit
def _finish(
    out,
    up_out,
    bias,
    delta,
    y,
    delta_stride,
    y_stride,
    tokens,
    n,
    row,
    token,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Bias, delta, gate, residual; rounded once, and once more where it is added."""
    inside = (token[:, None] < tokens) & (row[None, :] < n)
    if bias is not None:
        out += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "none":
            up_out += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    if delta is not None:
        at_delta = delta + token[:, None] * delta_stride + row[None, :]
        out += tl.load(at_delta, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION != "none":
            up_out += tl.load(at_delta + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        out = gated_unit(out, up_out, ACTIVATION)
    at_y = y + token[:, None] * y_stride + row[None, :]
    out = out.to(y.dtype.element_ty)
    if ADD:
        out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
    tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)
