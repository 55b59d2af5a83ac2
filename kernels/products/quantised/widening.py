"""Numbers of 8 and 4 bits, widened in registers.

Numbers become bfloat16 two at a time. A whole number of 4 bits joined with bits 0x4300 is 128 more
than it is; one of e2m1, moved to where a bfloat16 has its sign, two bits of exponent and the first
of mantissa, is 2¹²⁶ times too small. Both are exact, also what is taken off or multiplied then.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: What `split` adds to whole numbers of 4 bits, where it joins bits.
JOINED: tl.constexpr = tl.constexpr(128.0)
#: Instructions on pairs of bfloat16: a sum with what is 1 times the first, and a product.
PLUS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
)
TIMES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }"
)


@triton.jit
def numbers_of(loaded, KIND: tl.constexpr):
    """Numbers of 8 bits; the interpreter reads e4m3 as bytes.

    A compiler that sees bytes turned into e4m3 takes both factors through registers.
    """
    if KIND == "fp8" and loaded.dtype == tl.int8:
        loaded = loaded.to(tl.float8e4nv, bitcast=True)
    return loaded


@triton.jit
def in_pairs(w, by_row, INSTRUCTION: tl.constexpr):
    """An instruction on two numbers of a tile at a time, and what its row has, in bfloat16."""
    of_row = tl.broadcast_to(by_row.to(tl.bfloat16)[:, None], w.shape)
    return tl.inline_asm_elementwise(
        INSTRUCTION, "=r,r,r", [w, of_row], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def split(packed, table, KIND: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers of bytes, of both planes where they have two; else twice the same.

    In bfloat16, and of KIND "int4" `JOINED` more than they are, where instructions can be chosen;
    else in float32.
    """
    if KIND == "int8" or KIND == "fp8":
        w = numbers_of(packed, KIND)
        if ASSEMBLY and tl.bfloat16 == DTYPE:
            w = w.to(tl.bfloat16)
        else:
            w = w.to(tl.float32)
        return w, w
    elif KIND == "table4":
        w = tl.load(table + (packed & 15).to(tl.int32))
        w1 = tl.load(table + ((packed >> 4) & 15).to(tl.int32))
        if ASSEMBLY and tl.bfloat16 == DTYPE:
            w, w1 = w.to(tl.bfloat16), w1.to(tl.bfloat16)
        return w, w1
    elif ASSEMBLY and tl.bfloat16 == DTYPE:
        return _split_pairs(packed, KIND)
    elif KIND == "int4":
        return (packed & 15).to(tl.float32), ((packed >> 4) & 15).to(tl.float32)
    else:
        return of_e2m1(packed & 15), of_e2m1((packed >> 4) & 15)


@triton.jit
def of_e2m1(code):
    """What 4 bits of e2m1 stand for, as float32."""
    code = code.to(tl.int32)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    # 2¹²⁶, in two steps: a device may take what is smaller than normal numbers for zero.
    exponent, mantissa = (code & 6) >> 1, (code & 1).to(tl.float32)
    small = tl.where((code & 8) != 0, -0.5, 0.5) * mantissa
    normal = (bits + (126 << 23)).to(tl.float32, bitcast=True)
    return tl.where(exponent == 0, small, normal)


@triton.jit
def _split_pairs(packed, KIND: tl.constexpr):
    """As `split`, 4 bytes at a time."""
    if KIND == "int4":
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 high, a, b, c, d;
            shr.u32 high, $4, 4;
            prmt.b32 a, $4, 0x43434343, 0x4140;
            prmt.b32 b, $4, 0x43434343, 0x4342;
            prmt.b32 c, high, 0x43434343, 0x4140;
            prmt.b32 d, high, 0x43434343, 0x4342;
            and.b32 $0, a, 0xFF0FFF0F;
            and.b32 $1, b, 0xFF0FFF0F;
            and.b32 $2, c, 0xFF0FFF0F;
            and.b32 $3, d, 0xFF0FFF0F;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, s, m, large, none;
            mov.b32 large, 0x7E807E80;
            mov.b32 none, 0x80008000;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 s, a, 12;
            shl.b32 m, a, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, s, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $0, m, large, none;
            shl.b32 s, b, 12;
            shl.b32 m, b, 6;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, s, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $1, m, large, none;
            shl.b32 s, a, 8;
            shl.b32 m, a, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, s, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $2, m, large, none;
            shl.b32 s, b, 8;
            shl.b32 m, b, 2;
            and.b32 m, m, 0x01C001C0;
            lop3.b32 m, s, 0x80008000, m, 0xEA;
            fma.rn.bf16x2 $3, m, large, none;
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def widened(packed, plane, s, z, table, KIND: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What numbers of one plane of bytes stand for, float32; s and z as stored, of each."""
    JOIN: tl.constexpr = ASSEMBLY and (KIND == "int4" or KIND == "mxfp4")
    low, high = split(packed, table, KIND, tl.bfloat16 if JOIN else tl.float32, JOIN)
    w = (high if plane else low).to(tl.float32)
    if KIND == "int4":
        w -= 8.0 + (JOINED if JOIN else 0.0)
    return (w - z) * factor_of(s, KIND)


@triton.jit
def factor_of(s, KIND: tl.constexpr):
    """Scales as stored -> float32."""
    if KIND == "mxfp4":
        factor = (s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        factor = s.to(tl.float32)
    return factor


@triton.jit
def halves(word):
    """Two bfloat16 of 32 bits, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
