"""Codes in lanes (`lanes`) as numbers, two at a time, without changing their places."""

from __future__ import annotations

import triton
import triton.language as tl

from tokenpod.kernels.products.quantised.widening import PLUS, in_pairs, of_e2m1


@triton.constexpr_function
def table_assembly(table):
    """Instructions that make two lanes four pairs of bfloat16 out of a table of 8 words.

    A permutation of bytes takes four codes at a time, and looks into half of the table: its first
    half or its second is then chosen by the codes' highest bits.
    """
    words = "".join(f"mov.b32 t{i}, {word & 0xFFFFFFFF:#x};" for i, word in enumerate(table))
    looked_up = "".join(
        f"""
        prmt.b32 e, t0, t1, c;
        prmt.b32 f, t2, t3, c;
        prmt.b32 a, 0x0000FF00, 0, m;
        lop3.b32 lo, a, f, e, 0xCA;
        prmt.b32 e, t4, t5, c;
        prmt.b32 f, t6, t7, c;
        lop3.b32 hi, a, f, e, 0xCA;
        prmt.b32 ${first}, lo, hi, 0x5140;
        prmt.b32 ${first + 1}, lo, hi, 0x7362;
        shr.u32 c, c, 16;
        shr.u32 m, m, 16;"""
        for first in (0, 2)
    )
    return f"""{{
        .reg .b32 t<8>, c, m, e, f, a, lo, hi;
        {words}
        and.b32 c, $4, 0x77777777;
        shr.u32 m, $4, 3;
        and.b32 m, m, 0x11111111;{looked_up}
        }}"""


@triton.jit
def lane_planes(
    at_row,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    TABLE: tl.constexpr,
    DTYPE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """The numbers of lanes (`lanes`), plane by plane: four tiles [rows, WIDTH], of 8 bits two.

    They are multiples of 1 / `lane_unit`.

    Args:
        at_row: [rows], the first lane of each row.
        WIDTH: lanes of each row.
        KIND: "int4", "int8", "mxfp4" or "table4".
        TABLE: `Lanes.table`.
        DTYPE: what they become; instructions can be chosen for bfloat16.
        ASSEMBLY: whether they can.
    """
    lane = tl.arange(0, WIDTH)
    at = at_row[:, None] + lane[None, :]
    packed = tl.load(at, eviction_policy="evict_first")
    if ASSEMBLY and tl.bfloat16 == DTYPE:
        if KIND == "int4":
            return _int4_lanes(packed)
        elif KIND == "mxfp4":
            return _e2m1_lanes(packed)
        elif KIND == "table4":
            return _table_lanes(packed, TABLE)
        else:
            return _int8_lanes(packed)
    elif KIND == "int8":
        low, high = (packed << 8) >> 8, packed >> 8
        low, high = low.to(tl.float32).to(DTYPE), high.to(tl.float32).to(DTYPE)
        return low, high, low, high
    elif KIND == "table4":
        odd = (lane & 1)[None, :]
        low = tl.load(at - odd).to(tl.int32) & 0xFFFF
        word = low | (tl.load(at + 1 - odd).to(tl.int32) << 16)
        return (
            _of_table(word >> (4 * odd), TABLE, DTYPE),
            _of_table(word >> (4 * odd + 8), TABLE, DTYPE),
            _of_table(word >> (4 * odd + 16), TABLE, DTYPE),
            _of_table(word >> (4 * odd + 24), TABLE, DTYPE),
        )
    elif KIND == "int4":
        return (
            ((packed & 15) - 8).to(tl.float32).to(DTYPE),
            (((packed >> 4) & 15) - 8).to(tl.float32).to(DTYPE),
            (((packed >> 8) & 15) - 8).to(tl.float32).to(DTYPE),
            (((packed >> 12) & 15) - 8).to(tl.float32).to(DTYPE),
        )
    else:
        return (
            of_e2m1(packed & 15).to(DTYPE),
            of_e2m1((packed >> 4) & 15).to(DTYPE),
            of_e2m1((packed >> 8) & 15).to(DTYPE),
            of_e2m1((packed >> 12) & 15).to(DTYPE),
        )


@triton.jit
def plus_zero(w, z, zero, KIND: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Whole numbers of a tile plus what `Lanes.zero` has for each row; `zero` None: nothing."""
    if zero is None:
        return w
    elif ASSEMBLY and tl.bfloat16 == DTYPE:
        return in_pairs(w, z / lane_unit(KIND, DTYPE, ASSEMBLY), PLUS)
    else:
        return (w.to(tl.float32) + z.to(tl.float32)[:, None]).to(DTYPE)


@triton.jit
def lane_unit(KIND: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What the numbers of `lane_planes` are to be multiplied by: bfloat16 has no larger factor."""
    if KIND == "int4" and ASSEMBLY and tl.bfloat16 == DTYPE:
        return 64.0
    else:
        return 1.0


@triton.jit
def _of_table(code, TABLE: tl.constexpr, DTYPE: tl.constexpr):
    """What 4 bits stand for in a table of 8 words: 16 low bytes of bfloat16, then the high ones."""
    code = code & 15
    low, high = tl.zeros_like(code), tl.zeros_like(code)
    for word in tl.static_range(4):
        shift = 8 * (code & 3)
        low = tl.where(code // 4 == word, (TABLE[word] >> shift) & 255, low)
        high = tl.where(code // 4 == word, (TABLE[4 + word] >> shift) & 255, high)
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _int4_lanes(packed):
    """Less 8, and 64 times too small: see `lane_unit`.

    Bits below the second exponent are evenly spaced in bfloat16: two planes of four need no shift.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high, large, less_large, less;
        mov.b32 large, 0x7F007F00;
        mov.b32 less_large, 0x7D007D00;
        mov.b32 less, 0xBE00BE00;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, large, less;
        fma.rn.bf16x2 $1, $1, less_large, less;
        fma.rn.bf16x2 $2, $2, large, less;
        fma.rn.bf16x2 $3, $3, less_large, less;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int8_lanes(packed):
    """The low 7 bits of a byte, joined with 0x4300, less its highest bit, joined the same."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c, d, h, minus;
        mov.b32 minus, 0xBF80BF80;
        shr.u32 h, $2, 8;
        lop3.b32 a, $2, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 b, $2, 0x00800080, 0x43004300, 0xEA;
        lop3.b32 c, h, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 d, h, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, b, minus, a;
        fma.rn.bf16x2 $1, d, minus, c;
        }""",
        "=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
    return low, high, low, high


@triton.jit
def _e2m1_lanes(packed):
    """The sign stays the highest bit; exponent and mantissa move to 2¹²⁶ times too small."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 s, m, large, none;
        mov.b32 large, 0x7E807E80;
        mov.b32 none, 0x80008000;
        shl.b32 s, $4, 12;
        shl.b32 m, $4, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $0, m, large, none;
        shl.b32 s, $4, 8;
        shl.b32 m, $4, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $1, m, large, none;
        shl.b32 s, $4, 4;
        shr.u32 m, $4, 2;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, s, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $2, m, large, none;
        shr.u32 m, $4, 6;
        and.b32 m, m, 0x01C001C0;
        lop3.b32 m, $4, 0x80008000, m, 0xEA;
        fma.rn.bf16x2 $3, m, large, none;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _table_lanes(packed, TABLE: tl.constexpr):
    return tl.inline_asm_elementwise(
        table_assembly(TABLE),
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
