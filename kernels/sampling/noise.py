"""Philox4x32-10 and exponential noise on the device, as `engine.sampling.rng` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

WATERMARK_KEY = tl.constexpr(15_485_863)

#: Noise is at least -log(1 - 2^-24), so no token wins by more than -log of it over its score.
MOST_LUCK = tl.constexpr(16.64)

_HALF_SQUARE_ROOT_BITS = tl.constexpr(0x3F3504F3)  # of the square root of 1/2
_LOG_2_HIGH = tl.constexpr(0.693359375)  # 9 bits: times an exponent it is exact
_LOG_2_LOW = tl.constexpr(-2.12194440054690583e-4)


@triton.jit
def precise_log(x):
    """Natural logarithm of normal float32 numbers, within two units in the last place.

    The hardware's has an absolute error of 2^-22, which is nothing for a score but much for noise
    close to 0, the noise of the tokens that win. log m = 2 artanh((m - 1) / (m + 1)).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _HALF_SQUARE_ROOT_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = mantissa - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9))))
    # log(1 + f) = f - s * (f - 2 * series): f is exact, the rest is small against it.
    e = exponent.to(tl.float32)
    return e * _LOG_2_HIGH + (f - (s * (f - 2.0 * series) - e * _LOG_2_LOW))


@triton.jit
def exponential(words):
    """Exponential(1) noise, float32 above 0, of uint32 words."""
    uniform = ((words >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -precise_log(uniform)


@triton.jit
def token_words(key, ids, position, stream):
    """One uint32 word for each int32 id: word id mod 4 of the counter (id // 4, ...)."""
    a, b, c, d = _words(key, ids // 4, position, stream)
    which = ids % 4
    return tl.where(which < 2, tl.where(which == 0, a, b), tl.where(which == 2, c, d))


@triton.jit
def span_words(key, first, position, stream, SPAN: tl.constexpr):
    """[SPAN] uint32: the words of ids from `first` (a multiple of 4), four to a counter."""
    a, b, c, d = _words(key, first // 4 + tl.arange(0, SPAN // 4), position, stream)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def _words(key, block, position, stream):
    zero = block * 0
    position = (zero + position).to(tl.int32)
    stream = (zero + stream).to(tl.int32)
    return tl.philox(key, block, position, stream, zero)
