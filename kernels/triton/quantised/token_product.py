"""Products of one token with a weight of 8 or 4 bits, bound by reading it.

The token is rounded to numbers of 8 bits by a launch of its own (`rounding`). A program has BLOCK_N
rows and walks along them: what a thread has loaded, 16 bytes of a row at a time, it multiplies
itself, four numbers per instruction, so nothing changes its place before the sums of rows are added
up. Whole numbers are multiplied by both digits of an input, exactly; pairs of e4m3 as float16, four
words at a time, whose sums go on in float32.

The first tile of the weight is on its way before the input is there, and AHEAD bytes more of every
row are asked into the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.rounding import Rounding
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton.launch import await_inputs, capability, launch_options
from tokenpod.kernels.triton.pointwise import gated_unit
from tokenpod.kernels.triton.product import asks_rows
from tokenpod.kernels.triton.product_kernels import ask_rows
from tokenpod.kernels.triton.quantised.lane_products import step_scales
from tokenpod.kernels.triton.quantised.rounding import Rounded, round_inputs
from tokenpod.kernels.triton.quantised.tiles import TokenTile
from tokenpod.kernels.triton.quantised.token_dots import SMALLER, add_step, in_fours
from tokenpod.kernels.triton.quantised.token_inputs import (
    ask_first,
    ask_norm,
    token_steps,
    token_words,
)

#: Bytes that a thread loads of a row at a time.
THREAD_BYTES = 16


def token_of(
    x: torch.Tensor,
    rounding: Rounding | None,
    norm: RowNorm | None,
    tile: TokenTile,
    width: int | None = None,
) -> torch.Tensor | Rounded:
    """What `multiply_token` takes: x [1, inputs] itself where its programs round, or rounded."""
    own = tile.rounds and (rounding is None or rounding.static is None)
    return x if own else round_inputs(x, rounding, norm=norm, width=width)


def multiply_token(
    x: torch.Tensor | Rounded,
    norm: RowNorm | None,
    kind: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    add: bool,
    tile: TokenTile,
    *,
    width: int = 64,
    group: int = 64,
) -> None:
    """Y [1, n] = (or += with `add`) x · weightᵀ + bias; with an activation gates come first.

    Args:
        x: one token [1, inputs], which programs round; or as it is rounded: two digits for "int8"
            and "int4", of this in the order of its lanes; e4m3 for "fp8".
        norm: of a token that programs round.
        kind: "int8", "fp8" or "int4".
        weight: [rows, inputs] of 8 bits, or lanes (`lanes`) without zeros whose blocks are full; a
            row is a multiple of `THREAD_BYTES`.
        scale: of each row; of "int4" [groups, rows].
        bias: [rows] or None.
        y: [1, n], contiguous.
        activation: of the gates; None: there are none.
        add: to what y holds.
        tile: how a program works.
        width: lanes of a plane.
        group: inputs that share a scale.
    """
    n = y.shape[1]
    words = weight.view(torch.int8).view(torch.int32)
    row_words = words.shape[1]
    block_n = max(1, tile.block_n // (1 if activation is None else 2))
    if isinstance(x, Rounded):
        inputs = (x.numbers.view(torch.int8).view(torch.int32), x.scale, None)
    else:
        inputs = (x, None, None if norm is None else norm.weight)
    token_product[(triton.cdiv(n, block_n),)](
        *inputs,
        *(words, scale, bias, y, n, len(scale), 0.0 if norm is None else norm.epsilon),
        tile.chunks if asks_rows(words) else 0,
        KIND=kind,
        ROW_WORDS=row_words,
        WIDTH=width,
        PER_GROUP=group // width,
        ACTIVATION="none" if activation is None else activation.value,
        ADD=add,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=row_words % tile.words == 0,
        BLOCK_N=block_n,
        WORDS=tile.words,
        AHEAD=tile.ahead if asks_rows(words) else 0,
        num_warps=tile.warps,
        **launch_options(y.device),
    )


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
    groups,
    epsilon,
    chunks,
    KIND: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
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
    tile_row = tl.arange(0, ALL)
    own = tl.minimum(first_row + tile_row % BLOCK_N, n - 1) + tile_row // BLOCK_N * n
    if KIND == "int4" and ASSEMBLY:
        own = _unknown(own)
    word = tl.arange(0, WORDS)[None, :]
    four = tl.arange(0, FOURS)[None, :]
    at_row = weight + own.to(tl.int64)[:, None] * ROW_WORDS
    ROUNDS: tl.constexpr = x.dtype.element_ty != tl.int32
    WHOLE: tl.constexpr = KIND == "int8"
    sums = tl.zeros((ALL, FOURS), tl.int32 if WHOLE else tl.float32)
    low_sums = tl.zeros((ALL, FOURS) if WHOLE else (1, 1), tl.int32)

    # Nothing here depends on the kernel before.
    w = _tile(at_row + word, word, ROW_WORDS, EVEN)
    s = _scales(scale, own, four, GATES * n, groups, KIND, WIDTH, PER_GROUP)
    of_row = tl.load(scale + own).to(tl.float32) if KIND != "int4" else 1.0 / 16
    if ROUNDS and norm_weight is not None and ASSEMBLY:
        ask_norm(norm_weight, KIND, ROW_WORDS)
    if ASSEMBLY:
        ask_first(weight, n * ROW_WORDS, chunks // GATES)
        if GATES == 2:
            ask_first(weight + n * ROW_WORDS, n * ROW_WORDS, chunks // GATES)
    if AHEAD > 0:
        ask_rows(weight, first_row, n, WORDS, ROW_WORDS, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, first_row + n, 2 * n, WORDS, ROW_WORDS, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    row = first_row + tl.arange(0, BLOCK_N)
    inside = row < n
    if ADD:
        before = tl.load(y + row, mask=inside, other=0.0).to(tl.float32)
    if ROUNDS:
        unit, times = token_steps(x, norm_weight, epsilon, KIND, ROW_WORDS, WIDTH, WORDS)
    else:
        unit, times = tl.load(x_scale), 1.0
    LAST: tl.constexpr = (ROW_WORDS - 1) // WORDS * WORDS
    for start in tl.range(0, LAST, WORDS, loop_unroll_factor=2):
        # The next tile is on its way while this one is multiplied.
        at = start + WORDS
        next_w = _tile(at_row + (at + word), at + word, ROW_WORDS, EVEN)
        next_s = _scales(scale, own, at // 4 + four, GATES * n, groups, KIND, WIDTH, PER_GROUP)
        v = _inputs(
            x,
            norm_weight,
            times,
            start // 4 + four,
            start + word,
            KIND,
            ROW_WORDS,
            WIDTH,
            EVEN,
            ROUNDS,
            ASSEMBLY,
        )
        sums, low_sums = add_step(sums, low_sums, w, s, v, KIND, PER_GROUP, ASSEMBLY)
        w, s = next_w, next_s
    v = _inputs(
        x,
        norm_weight,
        times,
        LAST // 4 + four,
        LAST + word,
        KIND,
        ROW_WORDS,
        WIDTH,
        EVEN,
        ROUNDS,
        ASSEMBLY,
    )
    sums, low_sums = add_step(sums, low_sums, w, s, v, KIND, PER_GROUP, ASSEMBLY)

    if WHOLE:
        out = tl.sum(sums.to(tl.float32) * 128.0 + low_sums.to(tl.float32), axis=1)
    else:
        out = tl.sum(sums, axis=1)
    UNIT: tl.constexpr = SMALLER if KIND == "fp8" else 1.0
    out *= of_row * unit * UNIT
    if GATES == 2:
        out, up = tl.split(tl.permute(tl.reshape(out, (2, BLOCK_N)), (1, 0)))
        if bias is not None:
            up += tl.load(bias + n + row, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        out += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if GATES == 2:
        out = gated_unit(out, up, ACTIVATION)
    out = out.to(y.dtype.element_ty)
    if ADD:
        out = out.to(tl.float32) + before
    tl.store(y + row, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _inputs(
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
def _scales(
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
def _unknown(row):
    """The same; but the compiler does not see that rows follow each other."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [row], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _tile(at, word, row_words, EVEN: tl.constexpr):
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
