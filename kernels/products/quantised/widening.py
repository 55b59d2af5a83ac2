"""What numbers of 8 and 4 bits are, and instructions on two numbers of 16 bits at a time."""

from __future__ import annotations

import triton
import triton.language as tl

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
def halves(word):
    """Two bfloat16 of 32 bits, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
