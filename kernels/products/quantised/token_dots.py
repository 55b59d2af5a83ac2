"""Products of what a thread has of a row with what it has of a token, for `token_product`.

Pairs of e4m3 are multiplied as float16, sixteen numbers at a time, whose sums go on in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: By what products of e4m3 are made smaller, so that float16 has sums of 16: 448² · 16 / 2⁸ fits.
SMALLER: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def add_step(sums, w, v, ASSEMBLY: tl.constexpr):
    """Sums plus the products of a tile."""
    return sums + _e4m3_dots(in_fours(w), v, ASSEMBLY)


@triton.jit
def in_fours(words):
    """Words [rows, 4 · fours] -> four times [rows, fours]: a thread has all four."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _e4m3_dots(w, v, ASSEMBLY: tl.constexpr):
    """Sums of the products of 16 bytes with 16 others, as e4m3, `SMALLER` times too small."""
    w0, w1, w2, w3 = w
    v0, v1, v2, v3 = v
    if ASSEMBLY:
        a0, b0 = _pairs(v0)
        a1, b1 = _pairs(v1)
        a2, b2 = _pairs(v2)
        a3, b3 = _pairs(v3)
        sums = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, t;
            .reg .b16 l, h;
            .reg .f32 f, g;
            mov.b32 {l, h}, $1;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            mul.rn.f16x2 s, a, $5;
            mul.rn.f16x2 t, b, $6;
            mov.b32 {l, h}, $2;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            fma.rn.f16x2 s, a, $7, s;
            fma.rn.f16x2 t, b, $8, t;
            mov.b32 {l, h}, $3;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            fma.rn.f16x2 s, a, $9, s;
            fma.rn.f16x2 t, b, $10, t;
            mov.b32 {l, h}, $4;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            fma.rn.f16x2 s, a, $11, s;
            fma.rn.f16x2 t, b, $12, t;
            add.rn.f16x2 s, s, t;
            mov.b32 {l, h}, s;
            cvt.f32.f16 f, l;
            cvt.f32.f16 g, h;
            add.f32 $0, f, g;
            }""",
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, a0, b0, a1, b1, a2, b2, a3, b3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        sums = _e4m3_dot(w0, v0) + _e4m3_dot(w1, v1) + _e4m3_dot(w2, v2) + _e4m3_dot(w3, v3)
    return sums


@triton.jit
def _pairs(word):
    """Two pairs of float16, `SMALLER` times too small, in words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 l, h;
        .reg .b32 less;
        mov.b32 less, 0x1C001C00;
        mov.b32 {l, h}, $2;
        cvt.rn.f16x2.e4m3x2 $0, l;
        cvt.rn.f16x2.e4m3x2 $1, h;
        mul.rn.f16x2 $0, $0, less;
        mul.rn.f16x2 $1, $1, less;
        }""",
        "=&r,=&r,r",
        [word],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _e4m3_dot(w, v):
    sums = tl.zeros(w.shape, tl.float32)
    for place in tl.static_range(4):
        sums += _e4m3_byte(w >> (8 * place)) * _e4m3_byte(v >> (8 * place))
    return sums / SMALLER


@triton.jit
def _e4m3_byte(byte):
    """2¹²⁰ times what the bits are as a float32, whose exponent is four bits of that."""
    bits = ((byte & 127) << 20) | ((byte & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
