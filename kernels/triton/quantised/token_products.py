"""One token's product with a weight of 8 or 4 bits, in one launch, bound by reading the weight.

As many programs as the device runs at a time walk over all rows. Each norms and rounds the token
for itself, once, and keeps it in registers (`token_words`): so nothing is launched before, and the
input is not read again with every few rows. A row lies across all threads. Tiles of rows come
through shared memory, several ahead, the first of them from the L2 cache, into which they are asked
before the input is there.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.formats.rounding import Rounding
from tokenpod.kernels.pointwise_ops import Activation
from tokenpod.kernels.triton.launch import await_inputs, capability, launch_options
from tokenpod.kernels.triton.pointwise import gated_unit
from tokenpod.kernels.triton.product_kernels import ask_rows
from tokenpod.kernels.triton.quantised.around import Around, start_from
from tokenpod.kernels.triton.quantised.lanes import Lanes
from tokenpod.kernels.triton.quantised.tiles import TokenTile
from tokenpod.kernels.triton.quantised.token_dots import (
    bytes_dot,
    fp8_dot,
    nibble_planes,
    plane_dot,
    words_of_chunks,
)
from tokenpod.kernels.triton.quantised.token_scales import beside_rows, row_scales
from tokenpod.kernels.triton.quantised.token_words import (
    FP8_FACTOR,
    byte_words,
    chunk_inputs,
    digits_of,
    fp8_words,
    in_runs,
    rounded_token,
)

#: Words of a chunk, and the largest row of them that threads' registers hold the input of.
IN_CHUNK, MOST_WORDS = 4, 8192
#: Programs where there is no device: one walks over all rows.
INTERPRETED_UNITS = 1
#: Threads of a warp.
WARP = 32

OneScale = Int8Weight | Fp8Weight


def fits_token(weight: OneScale | Lanes) -> bool:
    """Whether rows are whole chunks, of few enough words, each of which has one scale or groups."""
    if isinstance(weight, Lanes):
        whole = weight.kind == "int4" and weight.width % 8 == 0
        return whole and weight.numbers.shape[1] <= 2 * MOST_WORDS
    if isinstance(weight, Fp8Weight) and not weight.by_output:
        return False
    grouped = weight.rounding is not None and weight.rounding.group is not None
    k = weight.shape[1]
    return not grouped and k % (4 * IN_CHUNK) == 0 and k <= 4 * MOST_WORDS


def add_token(
    x: torch.Tensor,
    weight: OneScale | Lanes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    delta: torch.Tensor | None,
    around: Around,
    tile: TokenTile,
) -> None:
    """As `multiply_token`, plus delta [T, outputs] before gates, if there is one."""

    def launch(out: torch.Tensor, activation: Activation | None, add: bool) -> None:
        multiply_token(x, weight, bias, out, Around(around.norm, activation, add), tile)

    start_from(delta, y, around, launch)


def multiply_token(
    x: torch.Tensor,
    weight: OneScale | Lanes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    around: Around,
    tile: TokenTile,
) -> None:
    """Y [T, n] = (or += with `add`) x · weightᵀ + bias, gated as `around` says; gates come first.

    The weight `fits_token`. Every token walks over the weight by itself: it is for one.

    Args:
        x: [T, inputs] of 16 bits, rows contiguous, in the weight's order, before the norm.
        weight: of 8 bits, or in lanes.
        bias: [outputs] or None.
        y: [T, n], rows contiguous.
        around: the norm of x, the activation of the gates, whether y is added to.
        tile: how a program works.
    """
    tokens, n = y.shape
    gates = 2 if around.gated else 1
    block_n = max(tile.block_n // gates, 1)
    words, kind, rounding = _words_of(weight)
    row_words = words.shape[1]
    zero, groups, per_group, width = None, 1, 0, 0
    if isinstance(weight, Lanes):
        zero, groups, width = weight.zero, len(weight.scale), weight.width
        per_group = weight.group // width
    norm_weight, epsilon = (None, 0.0) if around.norm is None else around.norm
    programs = min(triton.cdiv(n, block_n), tile.per_unit * units(y.device))
    chunks = triton.next_power_of_2(triton.cdiv(row_words, IN_CHUNK))
    token_product[(programs, tokens)](
        *(x, words, weight.scale, zero, bias, norm_weight),
        *(None if rounding is None else rounding.static, y, x.stride(0), y.stride(0)),
        *(n, x.shape[1], row_words, groups, epsilon),
        KIND=kind,
        DIGITS=2 if rounding is None else 1,
        PER_GROUP=per_group,
        WIDTH=width,
        ACTIVATION="none" if around.activation is None else around.activation.value,
        ADD=around.add,
        ASSEMBLY=capability(y.device) is not None,
        EVEN=row_words == IN_CHUNK * chunks and n % block_n == 0,
        RUNS=max(chunks // (WARP * tile.span), 1),
        CHUNKS=chunks,
        BLOCK_N=block_n,
        STAGES=tile.stages,
        AHEAD=4 * row_words if tile.ahead and capability(y.device) is not None else 0,
        AHEAD_BLOCKS=tile.ahead,
        num_warps=tile.warps,
        **launch_options(y.device),
    )


def _words_of(weight: OneScale | Lanes) -> tuple[torch.Tensor, str, Rounding | None]:
    """[rows, words] int32, the kind of numbers in them, and how inputs are rounded."""
    if isinstance(weight, Lanes):
        return weight.numbers.view(torch.int32), "int4", None
    kind = "fp8" if isinstance(weight, Fp8Weight) else "int8"
    return weight.numbers.view(torch.int8).view(torch.int32), kind, weight.rounding


@cache
def units(device: torch.device) -> int:
    """Of a device, each of which runs some programs at a time."""
    if device.type != "cuda":
        return INTERPRETED_UNITS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def token_product(
    x,
    weight,
    scale,
    zero,
    bias,
    norm_weight,
    static,
    y,
    x_stride,
    y_stride,
    n,
    k,
    row_words,
    groups,
    epsilon,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    AHEAD_BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Y [tokens, n] (+)= x · weightᵀ + bias; with ACTIVATION the weight has 2n rows, gates first.

    KIND "int8", "fp8" or "int4", which is in lanes of WIDTH, PER_GROUP planes sharing a scale.
    DIGITS: 2 where inputs are not rounded. AHEAD bytes of a row of AHEAD_BLOCKS blocks are asked
    for at first.
    """
    GATED: tl.constexpr = ACTIVATION != "none"
    blocks = tl.cdiv(n, BLOCK_N)
    programs = tl.num_programs(0)
    own = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    if AHEAD > 0:
        for turn in tl.static_range(AHEAD_BLOCKS):
            asked = tl.minimum(own + turn * programs, blocks) * BLOCK_N
            ask_rows(weight, asked, n, 0, row_words, BLOCK_N, AHEAD)
            if GATED:
                ask_rows(weight, asked + n, 2 * n, 0, row_words, BLOCK_N, AHEAD)
    s = row_scales(
        scale, zero, own, n, groups, row_words, PER_GROUP, WIDTH, GATED, RUNS, CHUNKS, BLOCK_N
    )
    await_inputs(OVERLAP)

    i = chunk_inputs(k, KIND, WIDTH, CHUNKS)
    ROUNDED: tl.constexpr = "digits" if DIGITS == 2 else KIND
    q, step = rounded_token(x + token * x_stride, i, norm_weight, static, k, epsilon, ROUNDED)
    at_y = y + token * y_stride
    if KIND == "fp8":
        high = fp8_words(q, RUNS, CHUNKS)
        low, sums_of_x = high, high
    else:
        WORDS: tl.constexpr = 8 if KIND == "int4" else 4
        if DIGITS == 2:
            first, second = digits_of(q)
            high = byte_words(first, WORDS, RUNS, CHUNKS)
            low = byte_words(second, WORDS, RUNS, CHUNKS)
        else:
            high = byte_words(q, WORDS, RUNS, CHUNKS)
            low = high
        sums_of_x = high
        if zero is not None:
            sums_of_x = _plane_sums(q, RUNS, CHUNKS)

    # What is short is asked for one step ahead: it would be waited for.
    now = beside_rows(own, bias, at_y, n, GATED, ADD, BLOCK_N)
    for block in tl.range(own, blocks, programs, num_stages=STAGES):
        own_s, own_now = s, now
        ahead = tl.minimum(block + programs, blocks - 1)
        s = row_scales(
            scale, zero, ahead, n, groups, row_words, PER_GROUP, WIDTH, GATED, RUNS, CHUNKS, BLOCK_N
        )
        now = beside_rows(ahead, bias, at_y, n, GATED, ADD, BLOCK_N)
        row = block * BLOCK_N + tl.arange(0, BLOCK_N)
        at_row = weight + tl.minimum(row, n - 1).to(tl.int64) * row_words
        bias_s, up_bias, residual = own_now
        out = _rows(
            at_row, row_words, high, low, sums_of_x, own_s[0], own_s[1], zero,
            KIND, DIGITS, PER_GROUP, ASSEMBLY, EVEN, RUNS, CHUNKS, BLOCK_N,
        )  # fmt: skip
        out = out * step + bias_s
        if GATED:
            at_up = at_row + n.to(tl.int64) * row_words
            up = _rows(
                at_up, row_words, high, low, sums_of_x, own_s[2], own_s[3], zero,
                KIND, DIGITS, PER_GROUP, ASSEMBLY, EVEN, RUNS, CHUNKS, BLOCK_N,
            )  # fmt: skip
            out = gated_unit(out, up * step + up_bias, ACTIVATION)
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = (out.to(tl.float32) + residual).to(y.dtype.element_ty)
        tl.store(at_y + row, out, mask=row < n)


@triton.jit
def _rows(
    at_row,
    row_words,
    high,
    low,
    sums_of_x,
    s,
    z,
    zero,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    EVEN: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_N] float32: products of rows with the token, but for its scale."""
    LENGTH: tl.constexpr = 4 * CHUNKS // RUNS
    word = (tl.arange(0, RUNS) * LENGTH)[:, None, None] + tl.arange(0, LENGTH)[None, None, :]
    at = at_row[None, :, None] + word
    if EVEN:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=word < row_words, other=0, eviction_policy="evict_first")
    w = words_of_chunks(tile, RUNS, BLOCK_N, CHUNKS)
    if KIND == "fp8":
        return _all_runs(fp8_dot(w, high, ASSEMBLY)) * (s / FP8_FACTOR)
    elif KIND == "int8":
        return _all_runs(bytes_dot(w, high, low, DIGITS, ASSEMBLY).to(tl.float32)) * s
    else:
        planes = nibble_planes(w, ASSEMBLY)
        sums = _of_planes(planes, high, low, s, z, sums_of_x, zero, PER_GROUP, ASSEMBLY)
        return _all_runs(sums) * 0.0625


@triton.jit
def _all_runs(sums):
    """[RUNS, BLOCK_N, chunks] -> [BLOCK_N]: first where each thread has them."""
    return tl.sum(tl.sum(sums, axis=0), axis=1)


@triton.jit
def _of_planes(
    w, high, low, s, z, sums_of_x, zero, PER_GROUP: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Products of planes, each with the scale of its group, and what is added to its numbers."""
    w0, w1, w2, w3, w4, w5, w6, w7 = w
    h0, h1, h2, h3, h4, h5, h6, h7 = high
    l0, l1, l2, l3, l4, l5, l6, l7 = low
    if PER_GROUP % 2 == 0:
        first = bytes_dot((w0, w1, w2, w3), (h0, h1, h2, h3), (l0, l1, l2, l3), 2, ASSEMBLY)
        second = bytes_dot((w4, w5, w6, w7), (h4, h5, h6, h7), (l4, l5, l6, l7), 2, ASSEMBLY)
        if zero is not None:
            first = first.to(tl.float32) + z[0] * (sums_of_x[0] + sums_of_x[1])
            second = second.to(tl.float32) + z[2] * (sums_of_x[2] + sums_of_x[3])
        if PER_GROUP % 4 == 0:
            return (first + second).to(tl.float32) * s[0]
        else:
            return first.to(tl.float32) * s[0] + second.to(tl.float32) * s[2]
    else:
        p0 = plane_dot(w0, w1, h0, h1, l0, l1, ASSEMBLY).to(tl.float32)
        p1 = plane_dot(w2, w3, h2, h3, l2, l3, ASSEMBLY).to(tl.float32)
        p2 = plane_dot(w4, w5, h4, h5, l4, l5, ASSEMBLY).to(tl.float32)
        p3 = plane_dot(w6, w7, h6, h7, l6, l7, ASSEMBLY).to(tl.float32)
        if zero is not None:
            p0 += z[0] * sums_of_x[0]
            p1 += z[1] * sums_of_x[1]
            p2 += z[2] * sums_of_x[2]
            p3 += z[3] * sums_of_x[3]
        return p0 * s[0] + p1 * s[1] + p2 * s[2] + p3 * s[3]


@triton.jit
def _plane_sums(q, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 32] -> 16 times the sums of 8 inputs of each plane, as `in_runs` makes them."""
    sums = tl.sum(tl.reshape(q, (CHUNKS, 2, 2, 8)), axis=3).to(tl.float32) * 16.0
    even, odd = tl.split(sums)
    s0, s2 = tl.split(even)
    s1, s3 = tl.split(odd)
    return (
        in_runs(s0, RUNS, CHUNKS),
        in_runs(s1, RUNS, CHUNKS),
        in_runs(s2, RUNS, CHUNKS),
        in_runs(s3, RUNS, CHUNKS),
    )
