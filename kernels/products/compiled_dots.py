"""Sums of products of 8-bit numbers, as processors with AVX-512 VNNI make them: 64 at a time.

A compiler does not find these instructions by itself in loops that also widen and scale, so the
innermost loop is written in the compiler's language.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Outputs of a tile: a register holds a sum of 32 bits for each.
LANES = 16
#: Inputs that one instruction multiplies and adds for each output.
QUAD = 4

_BYTES = ir.VectorType(ir.IntType(8), LANES * QUAD)
_WORD = ir.IntType(32)
_SUMS = ir.VectorType(_WORD, LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
#: What a digit is worth in those of the plane behind it.
_BASE = ir.Constant(_FLOATS, [256.0] * LANES)
_FUSED = ("contract",)
#: The type of the instruction's operands; older compilers took words for bytes.
_OPERAND = _BYTES if llvm.llvm_version_info[0] >= 22 else _SUMS


@functools.cache
def available() -> bool:
    """Whether this processor has the instruction, for registers of 512 bits."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and bool(features.get("avx512bw"))


@intrinsic(prefer_literal=True)
def tile(
    typing_context: Any,
    tokens: Any,
    planes: Any,
    bits: Any,
    x: Any,
    x_stride: Any,
    codes: Any,
    steps: Any,
    zero: Any,
    scale: Any,
    sums: Any,
    sums_stride: Any,
    total: Any,
) -> Any:
    """Sums of 16 outputs for some tokens; of constants, then addresses and counts, all int64.

    - tokens, planes, bits: constants. A digit is worth 256 of the plane behind it;
    - x, its stride: tokens · planes rows of digits, int8, so many bytes apart;
    - codes, its steps: of 16 outputs and steps · 4 inputs (of 4 bits: steps · 8). A step is 64
      bytes without a sign: of 8 bits 4 inputs of each output, output by output; of 4 bits such
      4 in the low halves, and the next 4 in the high ones;
    - zero and scale of the outputs, [16] int32 and [16] float32;
    - sums, its stride: of each row's digits, int32, so many bytes apart;
    - total [tokens, 16] float32, to which scale · Σ (code - zero) · x is added.

    A plane's sum is exact within 32 bits.
    """
    del typing_context, x, x_stride, codes, steps, zero, scale, sums, sums_stride, total
    constants = (tokens, planes, bits)
    if not all(isinstance(each, types.IntegerLiteral) for each in constants):
        return None
    rows, digits, kind = tokens.literal_value * planes.literal_value, planes.literal_value, bits

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        found = _sums_of(builder, operands[3:7], rows, kind.literal_value)
        _add_scaled(builder, operands[7:], found, digits)
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 9), generate


def _sums_of(builder: Any, operands: Any, rows: int, bits: int) -> list[Any]:
    """Of codes times digits, [16] for each row."""
    x, stride, codes, steps = operands
    totals = [cgutils.alloca_once(builder, _SUMS) for _ in range(rows)]
    for total in totals:
        builder.store(ir.Constant(_SUMS, [0] * LANES), total)
    quads = 8 // bits
    with cgutils.for_range(builder, steps, intp=ir.IntType(64)) as loop:
        step = loop.index
        packed = _load(builder, builder.add(codes, _times(builder, step, LANES * QUAD)), _BYTES)
        inputs = builder.add(x, _times(builder, step, quads * QUAD))
        for at, numbers in enumerate(_unpacked(builder, packed, bits)):
            for row, total in enumerate(totals):
                there = builder.add(inputs, builder.mul(stride, _number(row)))
                four = _load(builder, builder.add(there, _number(at * QUAD)), _WORD)
                value = _dots(builder, builder.load(total), numbers, four)
                builder.store(value, total)
    return [builder.load(total) for total in totals]


def _add_scaled(builder: Any, operands: Any, found: list[Any], planes: int) -> None:
    """Take zeros away, put planes together, and add what they are worth to the totals."""
    zero, scale, sums, stride, total = operands
    zeros, scales = _load(builder, zero, _SUMS), _load(builder, scale, _FLOATS)
    for token in range(len(found) // planes):
        value = None
        for row in range(token * planes, (token + 1) * planes):
            at = builder.add(sums, builder.mul(stride, _number(row)))
            away = builder.mul(zeros, _spread(builder, _load(builder, at, _WORD)))
            part = builder.sitofp(builder.sub(found[row], away), _FLOATS)
            if value is not None:
                part = builder.fadd(builder.fmul(value, _BASE, flags=_FUSED), part, flags=_FUSED)
            value = part
        there = builder.add(total, _number(token * LANES * 4))
        more = builder.fmul(value, scales, flags=_FUSED)
        whole = builder.fadd(_load(builder, there, _FLOATS), more, flags=_FUSED)
        builder.store(whole, builder.inttoptr(there, _FLOATS.as_pointer()), align=4)


def _unpacked(builder: Any, packed: Any, bits: int) -> list[Any]:
    """Bytes of codes [64] each, of a step."""
    if bits == 8:
        return [packed]
    low = ir.Constant(_BYTES, [15] * LANES * QUAD)
    four = ir.Constant(_BYTES, [4] * LANES * QUAD)
    return [builder.and_(packed, low), builder.lshr(packed, four)]


def _dots(builder: Any, total: Any, codes: Any, four: Any) -> Any:
    """`total` and, for each output, the sum of its four codes times the four of a row."""
    kind = ir.FunctionType(_SUMS, [_SUMS, _OPERAND, _OPERAND])
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    operands = [builder.bitcast(each, _OPERAND) for each in (codes, _spread(builder, four))]
    return builder.call(function, [total, *operands])


def _spread(builder: Any, word: Any) -> Any:
    """The same word 16 times."""
    nothing = ir.Constant(_SUMS, ir.Undefined)
    alone = builder.insert_element(nothing, word, _WORD(0))
    return builder.shuffle_vector(alone, nothing, ir.Constant(_SUMS, [0] * LANES))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _times(builder: Any, value: Any, by: int) -> Any:
    return builder.mul(value, _number(by))


def _number(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)
