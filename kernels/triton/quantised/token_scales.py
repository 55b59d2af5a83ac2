"""What is short of a block of rows, as `token_products` asks for it: scales, zeros, biases."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.quantised.token_words import in_runs
from tokenpod.kernels.triton.quantised.widening import halves


@triton.jit
def row_scales(
    scale,
    zero,
    block,
    n,
    groups,
    row_words,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scales and zeros of a block's rows, then of those that they open."""
    own = tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
    if PER_GROUP == 0:
        s = tl.load(scale + own).to(tl.float32)
        up_s = s
        if GATED:
            up_s = tl.load(scale + n + own).to(tl.float32)
        return s, s, up_s, up_s
    else:
        rows = n * 2 if GATED else n
        s = _plane_scales(scale, own, rows, groups, PER_GROUP, WIDTH, RUNS, CHUNKS)
        z = _plane_zeros(zero, own, rows, PER_GROUP, WIDTH, RUNS, CHUNKS, row_words)
        up_s, up_z = s, z
        if GATED:
            up_s = _plane_scales(scale, own + n, rows, groups, PER_GROUP, WIDTH, RUNS, CHUNKS)
            up_z = _plane_zeros(zero, own + n, rows, PER_GROUP, WIDTH, RUNS, CHUNKS, row_words)
        return s, z, up_s, up_z


@triton.jit
def _plane_scales(
    scale,
    row,
    rows,
    groups,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Four tensors [RUNS, BLOCK_N, CHUNKS / RUNS]; planes of one group have the same."""
    chunk = in_runs(tl.arange(0, CHUNKS), RUNS, CHUNKS)
    plane = chunk // (WIDTH // 8) * 4
    s0 = _scale(scale, row, plane // PER_GROUP, rows, groups)
    s1, s2, s3 = s0, s0, s0
    if PER_GROUP % 4 != 0:
        s2 = _scale(scale, row, (plane + 2) // PER_GROUP, rows, groups)
        s3 = s2
        if PER_GROUP % 2 != 0:
            s1 = _scale(scale, row, (plane + 1) // PER_GROUP, rows, groups)
            s3 = _scale(scale, row, (plane + 3) // PER_GROUP, rows, groups)
    return s0, s1, s2, s3


@triton.jit
def _scale(scale, row, group, rows, groups):
    at = scale + tl.minimum(group, groups - 1) * rows + row[None, :, None]
    return tl.load(at).to(tl.float32)


@triton.jit
def _plane_zeros(
    zero,
    row,
    rows,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    row_words,
):
    """What is added to a block's planes, see `Lanes.zero`; without one any tensors."""
    if zero is None:
        nothing = tl.zeros((1, 1, 1), tl.float32)
        return nothing, nothing, nothing, nothing
    else:
        step = in_runs(tl.arange(0, CHUNKS), RUNS, CHUNKS) // (WIDTH // 8)
        step = tl.minimum(step, row_words * 2 // WIDTH - 1)
        if PER_GROUP % 2 == 0:
            word = tl.load(zero + step * rows + row[None, :, None])
            z0, z2 = halves(word)
            return z0, z0, z2, z2
        else:
            at = zero + step * (2 * rows) + row[None, :, None]
            z0, z1 = halves(tl.load(at))
            z2, z3 = halves(tl.load(at + rows))
            return z0, z1, z2, z3


@triton.jit
def beside_rows(
    block, bias, at_y, n, GATED: tl.constexpr, ADD: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Biases of a block's rows, those of what they open, and the residual stream there."""
    own = tl.minimum(block * BLOCK_N + tl.arange(0, BLOCK_N), n - 1)
    b = tl.zeros((BLOCK_N,), tl.float32)
    up_b, residual = b, b
    if bias is not None:
        b = tl.load(bias + own).to(tl.float32)
        if GATED:
            up_b = tl.load(bias + n + own).to(tl.float32)
    if ADD:
        residual = tl.load(at_y + own).to(tl.float32)
    return b, up_b, residual
