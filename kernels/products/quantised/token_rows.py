"""Tiles of rows and their token, for kernels of one token: read, and finished."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.pointwise.triton_pointwise import gated_unit
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
    factor,
    before,
    bias,
    y,
    n,
    first_row,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add up what threads have of rows; factor, bias, gate, residual; write."""
    BLOCK_N: tl.constexpr = before.shape[0]
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < n
    out = tl.sum(sums, axis=1) * (factor * SMALLER)
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
    ROW_WORDS: tl.constexpr,
    EVEN: tl.constexpr,
    ROUNDS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Words of the token that a thread's are multiplied by."""
    if ROUNDS:
        a0, a1 = token_words(x, norm_weight, times, four, ROW_WORDS, 0, ASSEMBLY)
        a2, a3 = token_words(x, norm_weight, times, four, ROW_WORDS, 1, ASSEMBLY)
        return a0, a1, a2, a3
    else:
        return _fours(x, word, ROW_WORDS, EVEN)


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
