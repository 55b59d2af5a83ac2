"""`token_product` by few programs, each of which walks over blocks of rows.

A row is one tile: so the token, rounded once by each program, stays in registers, and a block is on
its way while the one before is multiplied. The first one is before the input is there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.products.quantised.token_dots import add_step
from tokenpod.kernels.products.quantised.token_inputs import ask_blocks, ask_norm, token_steps
from tokenpod.kernels.products.quantised.token_rows import (
    finish_rows,
    rows_of,
    token_inputs,
)


@launched
@triton.jit(do_not_specialize=["chunks"])
def token_walk(
    x,
    x_scale,
    norm_weight,
    weight,
    scale,
    bias,
    y,
    n,
    epsilon,
    chunks,
    ROW_WORDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    ASKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    Each program asks for the first `chunks` blocks behind its first one before the input is there.
    """
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * BLOCK_N
    FOURS: tl.constexpr = ROW_WORDS // 4
    ROUNDS: tl.constexpr = x.dtype.element_ty != tl.int32
    blocks, programs = tl.cdiv(n, BLOCK_N), tl.num_programs(0)
    four, word = tl.arange(0, FOURS)[None, :], tl.arange(0, ROW_WORDS)[None, :]

    # Nothing here depends on the kernel before.
    own = rows_of(tl.program_id(0) * BLOCK_N, n, GATES, BLOCK_N, ASSEMBLY)
    at = weight + own.to(tl.int64)[:, None] * ROW_WORDS + word
    w = tl.load(at, eviction_policy="evict_first")
    of_row = tl.load(scale + own).to(tl.float32)
    if ASKS:
        if ROUNDS and norm_weight is not None:
            ask_norm(norm_weight, ROW_WORDS)
        ask_blocks(weight, n, chunks, ROW_WORDS, BLOCK_N)
        if GATES == 2:
            ask_blocks(weight + n * ROW_WORDS, n, chunks, ROW_WORDS, BLOCK_N)
    await_inputs(OVERLAP)
    if ROUNDS:
        unit, times = token_steps(x, norm_weight, epsilon, ROW_WORDS, ROW_WORDS)
    else:
        unit, times = tl.load(x_scale), 1.0
    v = token_inputs(x, norm_weight, times, four, word, ROW_WORDS, True, ROUNDS, ASSEMBLY)
    for block in tl.range(tl.program_id(0), blocks, programs):
        ahead = tl.minimum(block + programs, blocks - 1)
        own = rows_of(ahead * BLOCK_N, n, GATES, BLOCK_N, ASSEMBLY)
        at = weight + own.to(tl.int64)[:, None] * ROW_WORDS + word
        is_more = (block + programs < blocks) & (word < ROW_WORDS)
        next_w = tl.load(at, mask=is_more, other=0, eviction_policy="evict_first")
        next_of_row = tl.load(scale + own).to(tl.float32)
        before = tl.zeros((BLOCK_N,), tl.float32)
        if ADD:
            row = block * BLOCK_N + tl.arange(0, BLOCK_N)
            before = tl.load(y + row, mask=row < n, other=0.0).to(tl.float32)
        sums = add_step(tl.zeros((ALL, FOURS), tl.float32), w, v, ASSEMBLY)
        finish_rows(sums, of_row * unit, before, bias, y, n, block * BLOCK_N, ACTIVATION, ADD)
        w, of_row = next_w, next_of_row
