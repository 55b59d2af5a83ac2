"""Products of a chunk of a weight's row (4 words) with what a token has there (`token_words`)."""

from __future__ import annotations

import triton
import triton.language as tl

#: Four words of e4m3, and eight of two float16 each: a sum of 16 products, in float16 pair by pair.
FP8_DOT: tl.constexpr = tl.constexpr(
    """{
    .reg .b16 l, h;
    .reg .b32 a, b, s;
    .reg .f32 f, g;
    mov.b32 {l, h}, $1;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    mul.rn.f16x2 s, a, $5;
    fma.rn.f16x2 s, b, $6, s;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    fma.rn.f16x2 s, a, $7, s;
    fma.rn.f16x2 s, b, $8, s;
    mov.b32 {l, h}, $3;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    fma.rn.f16x2 s, a, $9, s;
    fma.rn.f16x2 s, b, $10, s;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    fma.rn.f16x2 s, a, $11, s;
    fma.rn.f16x2 s, b, $12, s;
    mov.b32 {l, h}, s;
    cvt.f32.f16 f, l;
    cvt.f32.f16 g, h;
    add.f32 $0, f, g;
    }"""
)
#: Four words of whole numbers, and four of high digits and of low ones: 128 · high + low.
DIGITS_DOT: tl.constexpr = tl.constexpr(
    """{
    .reg .s32 s;
    dp4a.s32.s32 s, $1, $5, 0;
    dp4a.s32.s32 s, $2, $6, s;
    dp4a.s32.s32 s, $3, $7, s;
    dp4a.s32.s32 s, $4, $8, s;
    shl.b32 s, s, 7;
    dp4a.s32.s32 s, $1, $9, s;
    dp4a.s32.s32 s, $2, $10, s;
    dp4a.s32.s32 s, $3, $11, s;
    dp4a.s32.s32 $0, $4, $12, s;
    }"""
)
BYTES_DOT: tl.constexpr = tl.constexpr(
    """{
    .reg .s32 s;
    dp4a.s32.s32 s, $1, $5, 0;
    dp4a.s32.s32 s, $2, $6, s;
    dp4a.s32.s32 s, $3, $7, s;
    dp4a.s32.s32 $0, $4, $8, s;
    }"""
)
#: Four words of eight lanes of 4 bits: a nibble less 8 is what it is with its highest bit turned,
#: in the high half of a byte 16 times. Even planes are low halves of bytes, odd ones high halves.
NIBBLES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, m, t;
    mov.b32 m, 0xF0F0F0F0;
    mov.b32 t, 0x80808080;
    prmt.b32 a, $8, $9, 0x6420;
    prmt.b32 b, $10, $11, 0x6420;
    prmt.b32 c, $8, $9, 0x7531;
    prmt.b32 d, $10, $11, 0x7531;
    lop3.b32 $2, a, m, t, 0x6A;
    lop3.b32 $3, b, m, t, 0x6A;
    lop3.b32 $6, c, m, t, 0x6A;
    lop3.b32 $7, d, m, t, 0x6A;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    shl.b32 c, c, 4;
    shl.b32 d, d, 4;
    lop3.b32 $0, a, m, t, 0x6A;
    lop3.b32 $1, b, m, t, 0x6A;
    lop3.b32 $4, c, m, t, 0x6A;
    lop3.b32 $5, d, m, t, 0x6A;
    }"""
)
#: Two words of whole numbers, and two of high digits and of low ones: 128 · high + low.
PLANE_DOT: tl.constexpr = tl.constexpr(
    """{
    .reg .s32 s;
    dp4a.s32.s32 s, $1, $3, 0;
    dp4a.s32.s32 s, $2, $4, s;
    shl.b32 s, s, 7;
    dp4a.s32.s32 s, $1, $5, s;
    dp4a.s32.s32 $0, $2, $6, s;
    }"""
)


@triton.jit
def words_of_chunks(words, RUNS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr):
    """[RUNS, BLOCK_N, 4 · CHUNKS / RUNS] -> 4 tensors [RUNS, BLOCK_N, CHUNKS / RUNS]."""
    even, odd = tl.split(tl.reshape(words, (RUNS, BLOCK_N, CHUNKS // RUNS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def fp8_dot(w, x, ASSEMBLY: tl.constexpr):
    """Words of e4m3 times words of two float16 -> float32 sums, times `FP8_FACTOR`."""
    w0, w1, w2, w3 = w
    x0, x1, x2, x3, x4, x5, x6, x7 = x
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            FP8_DOT,
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        first = _fp8_word(w0, x0, x1) + _fp8_word(w1, x2, x3)
        return first + _fp8_word(w2, x4, x5) + _fp8_word(w3, x6, x7)


@triton.jit
def bytes_dot(w, high, low, DIGITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Words of whole numbers times such, or times two digits -> int32 sums, exact."""
    w0, w1, w2, w3 = w
    h0, h1, h2, h3 = high
    if ASSEMBLY and DIGITS == 2:
        l0, l1, l2, l3 = low
        return tl.inline_asm_elementwise(
            DIGITS_DOT,
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, h0, h1, h2, h3, l0, l1, l2, l3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif ASSEMBLY:
        return tl.inline_asm_elementwise(
            BYTES_DOT,
            "=r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, h0, h1, h2, h3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        sums = _word(w0, h0) + _word(w1, h1) + _word(w2, h2) + _word(w3, h3)
        if DIGITS == 2:
            l0, l1, l2, l3 = low
            sums = 128 * sums + _word(w0, l0) + _word(w1, l1) + _word(w2, l2) + _word(w3, l3)
        return sums


@triton.jit
def nibble_planes(w, ASSEMBLY: tl.constexpr):
    """Words of lanes of 4 bits -> two words of each of 4 planes, whole numbers less 8, 16 times."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            NIBBLES,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
            [w[0], w[1], w[2], w[3]],
            dtype=(
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
                tl.int32,
            ),
            is_pure=True,
            pack=1,
        )
    else:
        a0, a1, a2, a3 = _planes(w[0], w[1])
        b0, b1, b2, b3 = _planes(w[2], w[3])
        return a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def plane_dot(a, b, h0, h1, l0, l1, ASSEMBLY: tl.constexpr):
    """Two words of whole numbers times two digits -> int32 sums, exact."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            PLANE_DOT,
            "=r,r,r,r,r,r,r",
            [a, b, h0, h1, l0, l1],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return 128 * (_word(a, h0) + _word(b, h1)) + _word(a, l0) + _word(b, l1)


@triton.jit
def _word(a, b):
    """Four products of whole numbers of 8 bits."""
    sums = (a >> 24) * (b >> 24)
    for byte in tl.static_range(3):
        sums += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
    return sums


@triton.jit
def _planes(first, second):
    """Two words of lanes -> a word of each plane, less 8 and 16 times."""
    low = _bytes_at(first, second, 0)
    high = _bytes_at(first, second, 8)
    return _signed(low << 4), _signed(low), _signed(high << 4), _signed(high)


@triton.jit
def _bytes_at(first, second, SHIFT: tl.constexpr):
    """A byte of each of four lanes."""
    one = ((first >> SHIFT) & 255) | (((first >> (16 + SHIFT)) & 255) << 8)
    return one | (((second >> SHIFT) & 255) << 16) | (((second >> (16 + SHIFT)) & 255) << 24)


@triton.jit
def _signed(word):
    return (word & -252645136) ^ -2139062144  # 0xF0F0F0F0, 0x80808080


@triton.jit
def _fp8_word(word, x0, x1):
    """Four products of e4m3, of which a word is four, with float16."""
    sums = _e4m3(word) * _half(x0)
    sums += _e4m3(word >> 8) * _half(x0 >> 16)
    sums += _e4m3(word >> 16) * _half(x1)
    return sums + _e4m3(word >> 24) * _half(x1 >> 16)


@triton.jit
def _half(bits):
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _e4m3(byte):
    """2¹²⁰ times what the bits are as a float32, whose exponent is four bits of that."""
    bits = ((byte & 127) << 20) | ((byte & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
