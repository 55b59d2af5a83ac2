"""The token of `token_product`, rounded to 8 bits by each of its programs, and what those ask for.

Instead of a launch before it (`rounding`): programs read the token twice, once for its norm and its
largest number, and once where they multiply it. A thread rounds the inputs that it multiplies.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import ask_lines
from tokenpod.kernels.products.product_kernels import ask_each
from tokenpod.kernels.products.quantised.input_rounding import FP8_MOST

#: Bytes that are asked for at a time, and programs that ask for them: about one per processor.
CHUNK: tl.constexpr = tl.constexpr(8192)
FIRST_PROGRAMS: tl.constexpr = tl.constexpr(128)


@triton.jit
def token_steps(
    x,
    norm_weight,
    epsilon,
    ROW_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """(what multiplies sums in the end, what inputs are multiplied by): one number each."""
    FOURS: tl.constexpr = WORDS // 4
    k = ROW_WORDS * 4
    most = tl.zeros((1, FOURS, 8), tl.int32)
    squares = tl.zeros((1, FOURS, 8) if norm_weight is not None else (1, 1, 1), tl.float32)
    for start in tl.range(0, ROW_WORDS, WORDS):
        four = start // 4 + tl.arange(0, FOURS)[None, :]
        for eight in tl.static_range(2):
            v, square = _eight(x, norm_weight, four * 16 + eight * 8, four * 4 < ROW_WORDS)
            # As bits, what is no number is larger than any, and stays in a maximum.
            most = tl.maximum(most, tl.abs(v).to(tl.int32, bitcast=True))
            if norm_weight is not None:
                squares += square
    largest = tl.max(tl.max(tl.max(most, axis=2), axis=1), axis=0).to(tl.float32, bitcast=True)
    step = largest / FP8_MOST + largest * 0.0
    times = tl.where(step > 0, 1.0 / step, 1.0)
    if norm_weight is not None:
        step *= tl.rsqrt(tl.sum(squares) / k + epsilon)
    return step, times


@triton.jit
def token_words(
    x,
    norm_weight,
    times,
    four,
    ROW_WORDS: tl.constexpr,
    EIGHT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Inputs of a thread's EIGHTth eight: two words of e4m3."""
    v, _ = _eight(x, norm_weight, four * 16 + EIGHT * 8, four * 4 < ROW_WORDS)
    even, odd = tl.split(tl.reshape(v, (1, four.shape[1], 2, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    a0, b0 = tl.split(v0)
    a1, b1 = tl.split(v1)
    a2, b2 = tl.split(v2)
    a3, b3 = tl.split(v3)
    return (
        _word_of_e4m3(a0, a1, a2, a3, times, ASSEMBLY),
        _word_of_e4m3(b0, b1, b2, b3, times, ASSEMBLY),
    )


@triton.jit
def _eight(x, norm_weight, first, inside):
    """Eight inputs from each first one [1, fours, 8] times the norm's weight; their squares."""
    at = first[:, :, None] + tl.arange(0, 8)[None, None, :]
    v = tl.load(x + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    square = v * v
    if norm_weight is not None:
        v *= tl.load(norm_weight + at, mask=inside[:, :, None], other=0.0).to(tl.float32)
    return v, square


@triton.jit
def _word_of_e4m3(v0, v1, v2, v3, times, ASSEMBLY: tl.constexpr):
    if ASSEMBLY:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;
            mov.b32 $0, {l, h};
            }""",
            "=r,f,f,f,f",
            [v0 * times, v1 * times, v2 * times, v3 * times],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a, b = _byte_of_e4m3(v0 * times), _byte_of_e4m3(v1 * times)
        c, d = _byte_of_e4m3(v2 * times), _byte_of_e4m3(v3 * times)
        word = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    return word


@triton.jit
def _byte_of_e4m3(v):
    v = tl.minimum(tl.maximum(v, -FP8_MOST), FP8_MOST)
    return v.to(tl.float8e4nv).to(tl.int8, bitcast=True).to(tl.int32)


@triton.jit
def ask_first(weight, words, chunks):
    """Ask for a part of the weight's beginning: so many chunks per program, of the first ones.

    They are there as soon as there is room on a processor, while the kernels before still run;
    others only when those have ended.
    """
    WORDS: tl.constexpr = CHUNK // 4
    first = tl.program_id(0) * chunks
    asked = tl.where(tl.program_id(0) < FIRST_PROGRAMS, chunks, 0)
    asked = tl.minimum(asked, words // WORDS - first)
    size = tl.full((), CHUNK, tl.int32)
    ask_each(weight + first.to(tl.int64) * WORDS, asked, size, size)


@triton.jit
def ask_blocks(weight, n, count, ROW_WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Ask for some blocks of rows behind the first one of a program that walks over them."""
    SIZE: tl.constexpr = BLOCK_N * ROW_WORDS * 4
    programs = tl.num_programs(0)
    first = tl.program_id(0) + programs
    left = tl.cdiv(tl.maximum(n // BLOCK_N - first, 0), programs)
    size = tl.full((), SIZE, tl.int32)
    at = weight + first.to(tl.int64) * (SIZE // 4)
    ask_each(at, tl.minimum(count, left), programs * SIZE, size)


@triton.jit
def ask_norm(norm_weight, ROW_WORDS: tl.constexpr):
    """Ask for the norm's weight: every program reads it, as soon as the input is there."""
    INPUTS: tl.constexpr = ROW_WORDS * 4
    LINE: tl.constexpr = 128 * 8 // norm_weight.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(INPUTS, LINE)))
    ask_lines(norm_weight + tl.minimum(line * LINE, INPUTS - 1))
