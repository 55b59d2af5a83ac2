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


@triton.jit
def multiply_add_words(
    x,
    weight,
    scale,
    zero,
    bias,
    delta,
    norm_weight,
    y,
    n,
    k,
    epsilon,
    blocks,
    blocks_in_group,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As above for one token, of a weight of 4 bits: words [n, blocks · RUN] int32.

    Blocks have 8 · RUN inputs, and all BLOCKS of them are in one tile: the input is read once and
    stays in registers, while a program walks over rows, BLOCK_N at a time, the next ones on their
    way. Scale and zero are [n, ⌈blocks / blocks_in_group⌉]; without a zero it is 8.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    # Axes: row, block, word of the block. A thread has 4 words, and as many inputs at a time: so
    # nothing changes its layout.
    block = tl.arange(0, BLOCKS)[None, :, None]
    lane = tl.max_contiguous(tl.arange(0, RUN), 4)[None, None, :]
    word = block * RUN + lane
    there = block < blocks
    first = tl.program_id(0) * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    next_w, next_s, next_z = _rows(
        weight, scale, zero, row, n, word, block, there, blocks, blocks_in_group, RUN
    )
    next_up, next_up_s, next_up_z = next_w, next_s, next_z
    if GATED:
        next_up, next_up_s, next_up_z = _rows(
            weight, scale, zero, n + row, 2 * n, word, block, there, blocks, blocks_in_group, RUN
        )
    await_inputs(OVERLAP)
    i = block * (8 * RUN) + lane
    v0, f0 = _input(x, norm_weight, i, k)
    v1, f1 = _input(x, norm_weight, i + RUN, k)
    v2, f2 = _input(x, norm_weight, i + 2 * RUN, k)
    v3, f3 = _input(x, norm_weight, i + 3 * RUN, k)
    v4, f4 = _input(x, norm_weight, i + 4 * RUN, k)
    v5, f5 = _input(x, norm_weight, i + 5 * RUN, k)
    v6, f6 = _input(x, norm_weight, i + 6 * RUN, k)
    v7, f7 = _input(x, norm_weight, i + 7 * RUN, k)
    factor = 1.0
    if norm_weight is not None:
        squares = f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3 + f4 * f4 + f5 * f5 + f6 * f6 + f7 * f7
        factor = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, axis=2), axis=1), axis=0) / k + epsilon)
    low, high = v0 + v2 + v4 + v6, v1 + v3 + v5 + v7
    offset, total = LOW_OFFSET * low + HIGH_OFFSET * high, low + high
    for start in tl.range(first, n, tl.num_programs(0) * BLOCK_N):
        w, s, z, up, up_s, up_z = next_w, next_s, next_z, next_up, next_up_s, next_up_z
        row = start + tl.arange(0, BLOCK_N)
        ahead = row + tl.num_programs(0) * BLOCK_N
        next_w, next_s, next_z = _rows(
            weight, scale, zero, ahead, n, word, block, there, blocks, blocks_in_group, RUN
        )
        dot = _dot(w, v0, v1, v2, v3, v4, v5, v6, v7, ASSEMBLY)
        made = s.to(tl.float32) * (dot - offset - _float(z) * total)
        out = tl.sum(tl.sum(made, axis=2), axis=1) * factor
        up_out = out
        if GATED:
            next_up, next_up_s, next_up_z = _rows(
                weight,
                scale,
                zero,
                n + ahead,
                2 * n,
                word,
                block,
                there & (ahead < n)[:, None, None],
                blocks,
                blocks_in_group,
                RUN,
            )
            dot = _dot(up, v0, v1, v2, v3, v4, v5, v6, v7, ASSEMBLY)
            made = up_s.to(tl.float32) * (dot - offset - _float(up_z) * total)
            up_out = tl.sum(tl.sum(made, axis=2), axis=1) * factor
        _finish(
            out[None, :],
            up_out[None, :],
            bias,
            delta,
            y,
            0,
            0,
            1,
            n,
            row,
            tl.arange(0, 1),
            ACTIVATION,
            ADD,
        )


@triton.jit
def _rows(
    weight, scale, zero, row, rows, word, block, there, blocks, blocks_in_group, RUN: tl.constexpr
):
    """Words, scales and zeros of some rows; nothing of rows beyond the last."""
    inside = there & (row < rows)[:, None, None]
    w = _tile(weight + row.to(tl.int64)[:, None, None] * (blocks * RUN) + word, inside)
    groups = tl.cdiv(blocks, blocks_in_group)
    at = row.to(tl.int64)[:, None, None] * groups + block // blocks_in_group
    s = _tile(scale + at, inside)
    z = 8
    if zero is not None:
        z = _tile(zero + at, inside)
    return w, s, z


@triton.jit
def _dot(w, v0, v1, v2, v3, v4, v5, v6, v7, ASSEMBLY: tl.constexpr):
    """Of the 8 numbers of each word, with their offsets, and as many inputs."""
    dot = v0 * _float_at(w, 0, ASSEMBLY)
    dot += v1 * _float_at(w, 1, ASSEMBLY)
    dot += v2 * _float_at(w, 2, ASSEMBLY)
    dot += v3 * _float_at(w, 3, ASSEMBLY)
    dot += v4 * _float_at(w, 4, ASSEMBLY)
    dot += v5 * _float_at(w, 5, ASSEMBLY)
    dot += v6 * _float_at(w, 6, ASSEMBLY)
    dot += v7 * _float_at(w, 7, ASSEMBLY)
    return dot


@triton.jit
def _input(x, norm_weight, i, k):
    """Inputs i, float32: times the norm's weight, and as they are."""
    plain = tl.load(x + i, mask=i < k, other=0.0).to(tl.float32)
    v = plain
    if norm_weight is not None:
        v = plain * tl.load(norm_weight + i, mask=i < k, other=0.0).to(tl.float32)
    return v, plain


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
