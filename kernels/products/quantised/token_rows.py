"""Tiles of rows and their token, for kernels of one token: read, and finished."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
from tokenpod.kernels.products.quantised.lane_products import step_scales
from tokenpod.kernels.products.quantised.token_dots import SMALLER, in_fours
from tokenpod.kernels.products.quantised.token_inputs import token_words


@triton.jit
def rows_of(first_row, n, GATES: tl.constexpr, BLOCK_N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Rows of the weight from one on: gates, then what they open; beyond the last one, that."""
    tile_row = tl.arange(0, GATES * BLOCK_N)
    own = tl.minimum(first_row + tile_row % BLOCK_N, n - 1) + tile_row // BLOCK_N * n
    return unknown(own) if ASSEMBLY else own


@triton.jit
def finish_rows(
    sums,
    low_sums,
    factor,
    before,
    bias,
    y,
    n,
    first_row,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add up what threads have of rows; factor, bias, gate, residual; write."""
    BLOCK_N: tl.constexpr = before.shape[0]
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < n
    if KIND == "int8":
        out = tl.sum(sums.to(tl.float32) * 128.0 + low_sums.to(tl.float32), axis=1)
    else:
        out = tl.sum(sums, axis=1)
    UNIT: tl.constexpr = SMALLER if KIND == "fp8" else 1.0
    out *= factor * UNIT
    if ACTIVATION != "none":
        out, up = tl.split(tl.permute(tl.reshape(out, (2, BLOCK_N)), (1, 0)))
        if bias is not None:
            up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION != "none":
        out = gated_unit(out, up, ACTIVATION)
    out = out.to(y.dtype.element_ty)
    if ADD:
        out = out.to(tl.float32) + before
    tl.store(y + row, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def token_inputs(
    x,
    norm_weight,
    times,
    four,
    word,
    KIND: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Words of the token that a step's words are multiplied by: four fours, of 8 bits two.

    High digits, of 4 bits those of planes 0 and 1, then of 2 and 3; low digits the same. Of a plane
    eight lanes follow each other.
    """
    if ROUNDS:
        a0, a1, l0, l1 = token_words(
            x, norm_weight, times, four, KIND, ROW_WORDS, WIDTH, 0, ASSEMBLY
        )
        a2, a3, l2, l3 = token_words(
            x, norm_weight, times, four, KIND, ROW_WORDS, WIDTH, 1, ASSEMBLY
        )
        b0, b1, m0, m1, b2, b3, m2, m3 = a0, a1, l0, l1, a2, a3, l2, l3
        if KIND == "int4":
            b0, b1, m0, m1 = token_words(
                x, norm_weight, times, four, KIND, ROW_WORDS, WIDTH, 2, ASSEMBLY
            )
            b2, b3, m2, m3 = token_words(
                x, norm_weight, times, four, KIND, ROW_WORDS, WIDTH, 3, ASSEMBLY
            )
        return (a0, a1, a2, a3), (b0, b1, b2, b3), (l0, l1, l2, l3), (m0, m1, m2, m3)
    else:
        a = _fours(x, word, ROW_WORDS, EVEN)
        b, low_a, low_b = a, a, a
        if KIND == "int4":
            b = _fours(x + ROW_WORDS, word, ROW_WORDS, EVEN)
            low_a = _fours(x + 2 * ROW_WORDS, word, ROW_WORDS, EVEN)
            low_b = _fours(x + 3 * ROW_WORDS, word, ROW_WORDS, EVEN)
        elif KIND == "int8":
            low_a = _fours(x + ROW_WORDS, word, ROW_WORDS, EVEN)
        return a, b, low_a, low_b


@triton.jit
def scales_of(
    scale, own, four, rows, groups, KIND: tl.constexpr, WIDTH: tl.constexpr, PER_GROUP: tl.constexpr
):
    """Of the planes of a step's lanes; nothing where a row has one scale.

    Loaded as [fours, rows], of whose dimensions none is contiguous in memory for the compiler: with
    the first one along threads, as words are, so that nothing changes its place.
    """
    if KIND == "int4":
        block = tl.trans(four) // (WIDTH // 8)
        s0, s1, s2, s3 = step_scales(scale, own[None, :], block, rows, groups, 4, PER_GROUP)
        return tl.trans(s0), tl.trans(s1), tl.trans(s2), tl.trans(s3)
    else:
        return 0, 0, 0, 0


@triton.jit
def unknown(row):
    """The same; but the compiler does not see that rows follow each other."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [row], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def tile_of(at, word, row_words, EVEN: tl.constexpr):
    """Weights are read once: let them make room for what is read again."""
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=word < row_words, other=0, eviction_policy="evict_first")
    return w


@triton.jit
def _fours(x, word, row_words, EVEN: tl.constexpr):
    """Words of the token, as `_in_fours`; nothing beyond its end."""
    if EVEN:
        v = tl.load(x + word)
    else:
        v = tl.load(x + word, mask=word < row_words, other=0)
    return in_fours(v)
