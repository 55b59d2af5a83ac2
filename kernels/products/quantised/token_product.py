"""Products of one token with a weight of e4m3, bound by reading it.

The token is rounded to numbers of 8 bits by a launch of its own (`rounding`). A program has BLOCK_N
rows and walks along them: what a thread has loaded, 16 bytes of a row at a time, it multiplies
itself, as float16, four words at a time, whose sums go on in float32: so nothing changes its place
before the sums of rows are added up.

The first tile of the weight is on its way before the input is there, and AHEAD bytes more of every
row are asked into the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, capability, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products.formats.rounding import Rounding
from tokenpod.kernels.products.product_kernels import ask_rows
from tokenpod.kernels.products.quantised.input_rounding import Rounded, round_inputs
from tokenpod.kernels.products.quantised.quantised_tiles import TokenTile
from tokenpod.kernels.products.quantised.token_dots import add_step
from tokenpod.kernels.products.quantised.token_inputs import ask_first, ask_norm, token_steps
from tokenpod.kernels.products.quantised.token_rows import (
    finish_rows,
    rows_of,
    tile_of,
    token_inputs,
)
from tokenpod.kernels.products.quantised.token_walk import token_walk
from tokenpod.kernels.products.triton_product import asks_rows

#: Bytes that a thread loads of a row at a time.
THREAD_BYTES = 16


def token_of(
    x: torch.Tensor,
    rounding: Rounding,
    norm: RowNorm | None,
    tile: TokenTile,
) -> torch.Tensor | Rounded:
    """What `multiply_token` takes: x [1, inputs] itself where its programs round, or rounded."""
    own = tile.rounds and rounding.static is None
    return x if own else round_inputs(x, rounding, norm=norm)


def multiply_token(
    x: torch.Tensor | Rounded,
    norm: RowNorm | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    add: bool,
    tile: TokenTile,
) -> None:
    """Y [1, n] = (or += with `add`) x · weightᵀ + bias; with an activation gates come first.

    Args:
        x: one token [1, inputs], which programs round; or as it is rounded to e4m3.
        norm: of a token that programs round.
        weight: [rows, inputs] of e4m3, a row is a multiple of `THREAD_BYTES`.
        scale: of each row.
        bias: [rows] or None.
        y: [1, n], contiguous.
        activation: of the gates; None: there are none.
        add: to what y holds.
        tile: how a program works.
    """
    n = y.shape[1]
    words = weight.view(torch.int8).view(torch.int32)
    row_words = words.shape[1]
    block_n = max(1, tile.block_n // (1 if activation is None else 2))
    inputs: tuple[torch.Tensor | None, ...]
    if isinstance(x, Rounded):
        inputs = (x.numbers.view(torch.int8).view(torch.int32), x.scale, None)
    else:
        inputs = (x, None, None if norm is None else norm.weight)
    blocks = triton.cdiv(n, block_n)
    walks = tile.programs > 0 and row_words == tile.words
    asks = asks_rows(words)
    own = {
        "EVEN": row_words % tile.words == 0,
        "WORDS": tile.words,
        "AHEAD": tile.ahead if asks else 0,
    }
    (token_walk if walks else token_product)[(min(blocks, tile.programs) if walks else blocks,)](
        *inputs,
        *(words, scale, bias, y, n, 0.0 if norm is None else norm.epsilon),
        tile.chunks,
        ROW_WORDS=row_words,
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add,
        ASSEMBLY=capability(y.device) is not None,
        ASKS=asks and tile.chunks > 0,
        BLOCK_N=block_n,
        num_warps=tile.warps,
        **({} if walks else own),
        **launch_options(y.device),
    )


@launched
@triton.jit(do_not_specialize=["chunks"])
def token_product(
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
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first."""
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * BLOCK_N
    FOURS: tl.constexpr = WORDS // 4
    first_row = tl.program_id(0) * BLOCK_N
    own = rows_of(first_row, n, GATES, BLOCK_N, ASSEMBLY)
    word = tl.arange(0, WORDS)[None, :]
    four = tl.arange(0, FOURS)[None, :]
    at_row = weight + own.to(tl.int64)[:, None] * ROW_WORDS
    ROUNDS: tl.constexpr = x.dtype.element_ty != tl.int32
    sums = tl.zeros((ALL, FOURS), tl.float32)

    # Nothing here depends on the kernel before.
    w = tile_of(at_row + word, word, ROW_WORDS, EVEN)
    of_row = tl.load(scale + own).to(tl.float32)
    if ASKS:
        if ROUNDS and norm_weight is not None:
            ask_norm(norm_weight, ROW_WORDS)
        ask_first(weight, n * ROW_WORDS, chunks // GATES)
        if GATES == 2:
            ask_first(weight + n * ROW_WORDS, n * ROW_WORDS, chunks // GATES)
    if AHEAD > 0:
        ask_rows(weight, first_row, n, WORDS, ROW_WORDS, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, first_row + n, 2 * n, WORDS, ROW_WORDS, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    before = tl.zeros((BLOCK_N,), tl.float32)
    if ADD:
        row = first_row + tl.arange(0, BLOCK_N)
        before = tl.load(y + row, mask=row < n, other=0.0).to(tl.float32)
    if ROUNDS:
        unit, times = token_steps(x, norm_weight, epsilon, ROW_WORDS, WORDS)
    else:
        unit, times = tl.load(x_scale), 1.0
    LAST: tl.constexpr = (ROW_WORDS - 1) // WORDS * WORDS
    for start in tl.range(0, LAST, WORDS, loop_unroll_factor=2):
        # The next tile is on its way while this one is multiplied.
        at = start + WORDS
        next_w = tile_of(at_row + (at + word), at + word, ROW_WORDS, EVEN)
        v = token_inputs(
            x,
            norm_weight,
            times,
            start // 4 + four,
            start + word,
            ROW_WORDS,
            EVEN,
            ROUNDS,
            ASSEMBLY,
        )
        sums = add_step(sums, w, v, ASSEMBLY)
        w = next_w
    v = token_inputs(
        x,
        norm_weight,
        times,
        LAST // 4 + four,
        LAST + word,
        ROW_WORDS,
        EVEN,
        ROUNDS,
        ASSEMBLY,
    )
    sums = add_step(sums, w, v, ASSEMBLY)

    finish_rows(sums, of_row * unit, before, bias, y, n, first_row, ACTIVATION, ADD)
