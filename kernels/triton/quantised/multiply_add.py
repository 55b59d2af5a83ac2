"""Products of a handful of tokens with a weight of 8 bits, bound by reading it.

As `product_kernels.multiply_add`: a program has BLOCK_N rows of the weight and walks along them in
ordinary arithmetic, each number widened in registers; it can norm its input on the way, apply the
gate, and add to the residual. What differs is how a tile of the weight is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.launch import await_inputs
from tokenpod.kernels.triton.pointwise import gated_unit


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
