"""Products of a handful of tokens with a weight of 8 or 4 bits, bound by reading it.

As `product_kernels.multiply_add`: a program has BLOCK_N rows of the weight and walks along them in
ordinary arithmetic, each number widened in registers; it can norm its input on the way, apply the
gate, and add to the residual. What differs is how a tile of the weight is read.

4 bits: a word holds 8 inputs. Masked where they stand and joined with the exponent that makes the
lowest of these bits stand for 1, they are floats already, but for that exponent's own value: 128 at
bits 16 to 19, 2048 at bits 12 to 15. Its sum over the inputs is the same for all rows and is taken
off word by word, the group's zero with it. So a number costs a mask, a sum, and half a shift.
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


@triton.jit(do_not_specialize=["tokens"])
def multiply_add_bytes(
    x,
    weight,
    scale,
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
    FP8: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x [tokens, k] · weightᵀ, gates first with ACTIVATION.

    The weight's bytes are e4m3 with FP8, else whole numbers; a scale per row.
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

    s = tl.load(scale + own)[None, :]
    up_s = tl.load(scale + own + n)[None, :] if GATED else s
    next_w = _tile(start_of_row + i, i < k)
    next_up = _tile(start_of_up + i, i < k) if GATED else next_w
    await_inputs(OVERLAP)
    for start in tl.range(0, k, BLOCK_K):
        at = start + i
        # The next tile is on its way while this one is multiplied.
        w, up = next_w, next_up
        next_w = _tile(start_of_row + at + BLOCK_K, at + BLOCK_K < k)
        next_up = _tile(start_of_up + at + BLOCK_K, at + BLOCK_K < k) if GATED else next_w
        inside = (token < tokens) & (at < k)
        if EVEN and BLOCK_T == 1:
            v = tl.load(at_x + at).to(tl.float32)
        else:
            v = tl.load(at_x + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(norm_weight + at, mask=at < k, other=0.0).to(tl.float32)
        sums += v * _wide(w, FP8)
        if GATED:
            up_sums += v * _wide(up, FP8)

    token = tl.arange(0, BLOCK_T)
    out = tl.sum(sums, axis=2) * s
    up_out = tl.sum(up_sums, axis=2) * up_s if GATED else out
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=2) / k + epsilon)
        out *= factor
        up_out *= factor
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
    at_scale = rows * groups + block // blocks_in_group
    next_s, next_z = _tile(scale + at_scale, block < blocks), 8
    next_up_s, next_up_z = next_s, 8
    if zero is not None:
        next_z = _tile(zero + at_scale, block < blocks)
    if GATED:
        at_scale += n.to(tl.int64) * groups
        next_up_s = _tile(scale + at_scale, block < blocks)
        if zero is not None:
            next_up_z = _tile(zero + at_scale, block < blocks)
    await_inputs(OVERLAP)
    for start in tl.range(0, blocks, BLOCKS):
        at = start + block
        # The next tile is on its way while this one is multiplied.
        w, up, s, z, up_s, up_z = next_w, next_up, next_s, next_z, next_up_s, next_up_z
        ahead = at + BLOCKS
        next_w = _tile(start_of_row + ahead * RUN + lane, ahead < blocks)
        next_up = _tile(start_of_up + ahead * RUN + lane, ahead < blocks) if GATED else next_w
        at_scale = rows * groups + ahead // blocks_in_group
        next_s = _tile(scale + at_scale, ahead < blocks)
        if zero is not None:
            next_z = _tile(zero + at_scale, ahead < blocks)
        if GATED:
            at_scale += n.to(tl.int64) * groups
            next_up_s = _tile(scale + at_scale, ahead < blocks)
            if zero is not None:
                next_up_z = _tile(zero + at_scale, ahead < blocks)
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
        sums += s.to(tl.float32) * (dot - offset - _float(z) * total)
        if GATED:
            up_sums += up_s.to(tl.float32) * (up_dot - offset - _float(up_z) * total)

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
def _float(zero):
    """Also of what is the same for all groups, and then a plain number."""
    return zero * 1.0


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
def _tile(at, inside):
    """Weights are read once: let them make room for what is read again."""
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _wide(w, FP8: tl.constexpr):
    return w.to(tl.float8e4nv, bitcast=True).to(tl.float32) if FP8 else w.to(tl.float32)


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
