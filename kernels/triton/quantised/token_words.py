"""One token's input as words of 32 bits, in the registers of each program that multiplies it.

A thread multiplies 4 words of a weight's row at a time, a chunk: 16 numbers of 8 bits, or of 4 bits
8 of each of a lane's planes. What meets them are words too: four whole numbers of 8 bits, or two
float16 that hold e4m3. Inputs are normed and rounded on the way, by every program for itself: that
is less than a launch takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.triton.quantised.rounding import DIGITS_MOST, FP8_MOST, INT8_MOST

#: What inputs are multiplied by as float16: sums of 16 products of e4m3 stay in its range then, and
#: each product is exact.
FP8_FACTOR: tl.constexpr = tl.constexpr(0.015625)


@triton.jit
def chunk_inputs(k, KIND: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Which input each place of a chunk is, [CHUNKS, 16 or 32]; beyond k: none."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    if KIND == "int4":
        place = tl.arange(0, 32)[None, :]
        IN_PLANE: tl.constexpr = WIDTH // 8
        return (
            chunk // IN_PLANE * (4 * WIDTH) + place // 8 * WIDTH + chunk % IN_PLANE * 8 + place % 8
        )
    else:
        return chunk * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def rounded_token(at_x, i, norm_weight, static, k, epsilon, KIND: tl.constexpr):
    """Inputs i of a token, after its norm, as multiples of a scale, and the scale.

    KIND "fp8": float32 up to `FP8_MOST`; "int8", or "digits": int32 up to `DIGITS_MOST`.
    """
    MOST: tl.constexpr = (
        DIGITS_MOST if KIND == "digits" else (FP8_MOST if KIND == "fp8" else INT8_MOST)
    )
    inside = i < k
    loaded = tl.load(at_x + i, mask=inside, other=0.0)
    v = loaded.to(tl.float32)
    if norm_weight is not None:
        factor = tl.load(norm_weight + i, mask=inside, other=0.0)
        # Rounded where the norm by itself would be.
        v = v * tl.rsqrt(tl.sum(v * v) / k + epsilon)
        if factor.dtype == loaded.dtype:
            v = v.to(loaded.dtype).to(tl.float32)
        v = (v * factor.to(tl.float32)).to(loaded.dtype).to(tl.float32)
    # As bits, what is no number is larger than any, and stays in the maximum.
    bits = tl.max(tl.abs(v).to(tl.int32, bitcast=True))
    largest = bits.to(tl.float32, bitcast=True)
    if static is None:
        step = largest / MOST + largest * 0.0
    else:
        step = tl.load(static) + largest * 0.0
    q = v * tl.where(step > 0, 1.0 / step, 1.0)
    q = tl.minimum(tl.maximum(q, -MOST), MOST)
    if KIND != "fp8":
        # In the bits of what 1.5 · 2²³ is added to is the nearest whole number, ties to even.
        q = (q + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return q, step


@triton.jit
def fp8_words(q, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 16] -> 8 words of each chunk, two float16 each, which hold e4m3 · `FP8_FACTOR`."""
    halves = (q.to(tl.float8e4nv).to(tl.float32) * FP8_FACTOR).to(tl.float16)
    bits = halves.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    low, high = tl.split(tl.reshape(bits, (CHUNKS, 8, 2)))
    return _eight(low | (high << 16), RUNS, CHUNKS)


@triton.jit
def byte_words(q, WORDS: tl.constexpr, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 4 · WORDS] whole numbers of 8 bits -> 4 or 8 words of each chunk."""
    bits = tl.reshape(q & 255, (CHUNKS, WORDS, 2, 2))
    even, odd = tl.split(bits)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = first | (second << 8) | (third << 16) | (fourth << 24)
    if WORDS == 8:
        return _eight(words, RUNS, CHUNKS)
    else:
        return _four(words, RUNS, CHUNKS)


@triton.jit
def digits_of(q):
    """Whole numbers = 128 · high + low, both of 8 bits."""
    high = (q + 64) >> 7
    return high, q - (high << 7)


@triton.jit
def in_runs(of_chunks, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS] -> [RUNS, 1, CHUNKS / RUNS]: a run is as long as the threads of a row."""
    return tl.reshape(of_chunks, (RUNS, 1, CHUNKS // RUNS))


@triton.jit
def _four(words, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 4] -> 4 tensors as `in_runs` makes them."""
    even, odd = tl.split(tl.reshape(words, (CHUNKS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return (
        in_runs(w0, RUNS, CHUNKS),
        in_runs(w1, RUNS, CHUNKS),
        in_runs(w2, RUNS, CHUNKS),
        in_runs(w3, RUNS, CHUNKS),
    )


@triton.jit
def _eight(words, RUNS: tl.constexpr, CHUNKS: tl.constexpr):
    """[CHUNKS, 8] -> 8 tensors as `in_runs` makes them."""
    even, odd = tl.split(tl.reshape(words, (CHUNKS, 4, 2)))
    w0, w2, w4, w6 = _four(even, RUNS, CHUNKS)
    w1, w3, w5, w7 = _four(odd, RUNS, CHUNKS)
    return w0, w1, w2, w3, w4, w5, w6, w7
