"""Products of what a thread has of a row with what it has of a token, for `token_product`.

Whole numbers are multiplied by both digits of an input, four at a time, exactly; pairs of e4m3 as
float16, sixteen numbers at a time, whose sums go on in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.products.quantised.multiply_add import e4m3_byte
from tokenpod.kernels.products.quantised.widening import factor_of

#: By what products of e4m3 are made smaller, so that float16 has sums of 16: 448² · 16 / 2⁸ fits.
SMALLER: tl.constexpr = tl.constexpr(256.0)


@triton.jit
def add_step(
    sums,
    low_sums,
    w,
    s,
    v,
    KIND: tl.constexpr,
    PER_GROUP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Sums plus the products of a tile; of whole numbers of 8 bits those of both digits."""
    w = in_fours(w)
    if KIND == "int8":
        sums = _dots(sums, w, v[0], ASSEMBLY)
        low_sums = _dots(low_sums, w, v[2], ASSEMBLY)
    elif KIND == "fp8":
        sums += _e4m3_dots(w, v[0], ASSEMBLY)
    else:
        sums = _int4_dots(sums, w, s, v, PER_GROUP, ASSEMBLY)
    return sums, low_sums


@triton.jit
def in_fours(words):
    """Words [rows, 4 · fours] -> four times [rows, fours]: a thread has all four."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _dots(sums, w, v, ASSEMBLY: tl.constexpr):
    """Sums plus the products of 16 bytes with 16 others, as signed whole numbers."""
    w0, w1, w2, w3 = w
    v0, v1, v2, v3 = v
    sums = _dot(w0, v0, sums, ASSEMBLY)
    sums = _dot(w1, v1, sums, ASSEMBLY)
    sums = _dot(w2, v2, sums, ASSEMBLY)
    return _dot(w3, v3, sums, ASSEMBLY)


@triton.jit
def _dot(w, v, sums, ASSEMBLY: tl.constexpr):
    if ASSEMBLY:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [w, v, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for place in tl.static_range(4):
            SHIFT: tl.constexpr = 24 - 8 * place
            sums += ((w << SHIFT) >> 24) * ((v << SHIFT) >> 24)
    return sums


@triton.jit
def _int4_dots(sums, w, s, v, PER_GROUP: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Sums plus a step's products times 16: as many planes at once as share a scale."""
    s0, s1, s2, s3 = s
    w0, w1, w2, w3 = w
    a, b, low_a, low_b = v
    v0, v1, v2, v3 = a
    u0, u1, u2, u3 = b
    low_v0, low_v1, low_v2, low_v3 = low_a
    low_u0, low_u1, low_u2, low_u3 = low_b
    # Bytes of four lanes with planes 0 and 1, and with planes 2 and 3.
    a, c = _bytes_of(w0, w1, False, ASSEMBLY), _bytes_of(w0, w1, True, ASSEMBLY)
    b, d = _bytes_of(w2, w3, False, ASSEMBLY), _bytes_of(w2, w3, True, ASSEMBLY)
    a0, b0, a1, b1 = (
        _signed(a << 4, ASSEMBLY),
        _signed(b << 4, ASSEMBLY),
        _signed(a, ASSEMBLY),
        _signed(b, ASSEMBLY),
    )
    c0, d0, c1, d1 = (
        _signed(c << 4, ASSEMBLY),
        _signed(d << 4, ASSEMBLY),
        _signed(c, ASSEMBLY),
        _signed(d, ASSEMBLY),
    )
    none = tl.zeros_like(a)
    if PER_GROUP % 2 != 0:
        dot = _digits(a0, b0, v0, v1, low_v0, low_v1, none, ASSEMBLY)
        sums += dot.to(tl.float32) * factor_of(s0, "int4")
        dot = _digits(a1, b1, v2, v3, low_v2, low_v3, none, ASSEMBLY)
        sums += dot.to(tl.float32) * factor_of(s1, "int4")
        dot = _digits(c0, d0, u0, u1, low_u0, low_u1, none, ASSEMBLY)
        sums += dot.to(tl.float32) * factor_of(s2, "int4")
        dot = _digits(c1, d1, u2, u3, low_u2, low_u3, none, ASSEMBLY)
    else:
        high = _dot(b1, v3, _dot(a1, v2, none, ASSEMBLY), ASSEMBLY)
        dot = _digits(a0, b0, v0, v1, low_v0, low_v1, high, ASSEMBLY)
        dot = _dot(b1, low_v3, _dot(a1, low_v2, dot, ASSEMBLY), ASSEMBLY)
        sums += dot.to(tl.float32) * factor_of(s0, "int4")
        high = _dot(d1, u3, _dot(c1, u2, none, ASSEMBLY), ASSEMBLY)
        dot = _digits(c0, d0, u0, u1, low_u0, low_u1, high, ASSEMBLY)
        dot = _dot(d1, low_u3, _dot(c1, low_u2, dot, ASSEMBLY), ASSEMBLY)
    return sums + dot.to(tl.float32) * factor_of(s3, "int4")


@triton.jit
def _digits(a, b, v, u, low_v, low_u, high, ASSEMBLY: tl.constexpr):
    """128 · (high + a·v + b·u) + a·low_v + b·low_u"""
    high = _dot(b, u, _dot(a, v, high, ASSEMBLY), ASSEMBLY)
    return _dot(b, low_u, _dot(a, low_v, high << 7, ASSEMBLY), ASSEMBLY)


@triton.jit
def _signed(byte, ASSEMBLY: tl.constexpr):
    """16 times the number of 4 bits that is in the high half of each byte, as a signed byte."""
    if ASSEMBLY:
        made = tl.inline_asm_elementwise(
            """{
            .reg .b32 turned;
            mov.b32 turned, 0x80808080;
            lop3.b32 $0, $1, 0xF0F0F0F0, turned, 0x6A;
            }""",
            "=r,r",
            [byte],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        made = (byte & -0x0F0F0F10) ^ -0x7F7F7F80
    return made


@triton.jit
def _bytes_of(a, b, ODD: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Bytes 0 and 2 of both words, or 1 and 3."""
    if ASSEMBLY:
        made = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7531;" if ODD else "prmt.b32 $0, $1, $2, 0x6420;",
            "=r,r,r",
            [a, b],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        SHIFT: tl.constexpr = 8 if ODD else 0
        a, b = a >> SHIFT, b >> SHIFT
        made = (a & 255) | ((a >> 8) & 0xFF00) | ((b & 255) << 16) | ((b << 8) & -0x1000000)
    return made


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
        sums += e4m3_byte(w >> (8 * place)) * e4m3_byte(v >> (8 * place))
    return sums / SMALLER
