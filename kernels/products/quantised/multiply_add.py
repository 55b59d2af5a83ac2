"""Products of a handful of tokens with a weight of 8 bits, bound by reading it.

As `product_kernels.multiply_add`: a program has BLOCK_N rows of the weight and walks along them in
ordinary arithmetic, each number widened in registers; it can norm its input on the way, apply the
gate, and add to the residual. What differs is how a tile of the weight is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.product_kernels import ask_rows


@triton.jit(do_not_specialize=["tokens"])
def multiply_add_bytes(
    x,
    weight,
    scale,
    bias,
    norm_weight,
    y,
    x_stride,
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
    AHEAD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x [tokens, k] · weightᵀ, gates first with ACTIVATION.

    The weight is words of four e4m3 with FP8, else of whole numbers; a scale per row. AHEAD bytes
    of each row are asked into the L2 cache at first.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    NORM: tl.constexpr = norm_weight is not None
    WORDS: tl.constexpr = BLOCK_K // 4
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    own = tl.minimum(row, n - 1)
    row_words = k // 4
    start_of_row = weight + own.to(tl.int64)[None, :, None] * row_words
    start_of_up = weight + (own + n).to(tl.int64)[None, :, None] * row_words
    # A thread has 2 words, and 8 inputs: so nothing changes its layout.
    word = tl.max_contiguous(tl.arange(0, WORDS), 2)[None, None, :]
    i = tl.max_contiguous(tl.arange(0, BLOCK_K), 8)[None, None, :]
    token = tl.arange(0, BLOCK_T)[:, None, None]
    at_x = x + token * x_stride
    sums = tl.zeros((BLOCK_T, BLOCK_N, WORDS), tl.float32)
    up_sums = tl.zeros((BLOCK_T, BLOCK_N, WORDS) if GATED else (1, 1, 1), tl.float32)
    squares = tl.zeros((BLOCK_T, 1, BLOCK_K) if NORM else (1, 1, 1), tl.float32)

    s = tl.load(scale + own)[None, :]
    up_s = tl.load(scale + own + n)[None, :] if GATED else s
    next_w = _tile(start_of_row + word, word < row_words)
    next_up = _tile(start_of_up + word, word < row_words) if GATED else next_w
    if AHEAD > 0:
        first_row = tl.program_id(0) * BLOCK_N
        ask_rows(weight, first_row, n, WORDS, row_words, BLOCK_N, AHEAD)
        if GATED:
            ask_rows(weight, first_row + n, 2 * n, WORDS, row_words, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    for start in tl.range(0, k, BLOCK_K):
        at = start + i
        # The next tile is on its way while this one is multiplied.
        w, up = next_w, next_up
        at_next = start // 4 + WORDS + word
        next_w = _tile(start_of_row + at_next, at_next < row_words)
        next_up = _tile(start_of_up + at_next, at_next < row_words) if GATED else next_w
        inside = (token < tokens) & (at < k)
        if EVEN and BLOCK_T == 1:
            v = tl.load(at_x + at).to(tl.float32)
        else:
            v = tl.load(at_x + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += v * v
            v *= tl.load(norm_weight + at, mask=at < k, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(v, (BLOCK_T, 1, WORDS, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        sums = _add_word(sums, v0, v1, v2, v3, w, FP8, ASSEMBLY)
        if GATED:
            up_sums = _add_word(up_sums, v0, v1, v2, v3, up, FP8, ASSEMBLY)

    token = tl.arange(0, BLOCK_T)
    out = tl.sum(sums, axis=2) * s
    up_out = tl.sum(up_sums, axis=2) * up_s if GATED else out
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=2) / k + epsilon)
        out *= factor
        up_out *= factor
    _finish(out, up_out, bias, y, y_stride, tokens, n, row, token, ACTIVATION, ADD)


@triton.jit
def _tile(at, inside):
    """Weights are read once: let them make room for what is read again."""
    return tl.load(at, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _add_word(sums, v0, v1, v2, v3, word, FP8: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Sums plus the products of four inputs with the numbers of a word."""
    if FP8:
        w0, w1, w2, w3 = (
            e4m3_byte(word),
            e4m3_byte(word >> 8),
            e4m3_byte(word >> 16),
            e4m3_byte(word >> 24),
        )
    elif ASSEMBLY:
        w0, w1, w2, w3 = _wide(word)
    else:
        w0 = ((word << 24) >> 24).to(tl.float32)
        w1 = ((word << 16) >> 24).to(tl.float32)
        w2 = ((word << 8) >> 24).to(tl.float32)
        w3 = (word >> 24).to(tl.float32)
    sums += v0 * w0
    sums += v1 * w1
    sums += v2 * w2
    return sums + v3 * w3


@triton.jit
def _wide(word):
    """Four whole numbers, without conversions, which are a quarter as fast as other instructions.

    A byte with its highest bit turned is 128 more than it was; as the last one of 2²³, it is added.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d;
        .reg .f32 less;
        mov.b32 less, 0xCB000080;
        xor.b32 a, $4, 0x80808080;
        prmt.b32 b, a, 0x4B000000, 0x7541;
        prmt.b32 c, a, 0x4B000000, 0x7542;
        prmt.b32 d, a, 0x4B000000, 0x7543;
        prmt.b32 a, a, 0x4B000000, 0x7540;
        mov.b32 $0, a;
        mov.b32 $1, b;
        mov.b32 $2, c;
        mov.b32 $3, d;
        add.f32 $0, $0, less;
        add.f32 $1, $1, less;
        add.f32 $2, $2, less;
        add.f32 $3, $3, less;
        }""",
        "=&f,=&f,=&f,=&f,r",
        [word],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def e4m3_byte(byte):
    """2¹²⁰ times what the bits are as a float32, whose exponent is four bits of that."""
    bits = ((byte & 127) << 20) | ((byte & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _finish(
    out,
    up_out,
    bias,
    y,
    y_stride,
    tokens,
    n,
    row,
    token,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Bias, gate, residual; rounded once, and once more where it is added."""
    inside = (token[:, None] < tokens) & (row[None, :] < n)
    if bias is not None:
        out += tl.load(bias + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
        if ACTIVATION != "none":
            up_out += tl.load(bias + n + row, mask=row < n, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "none":
        out = gated_unit(out, up_out, ACTIVATION)
    at_y = y + token[:, None] * y_stride + row[None, :]
    out = out.to(y.dtype.element_ty)
    if ADD:
        out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
    tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)
