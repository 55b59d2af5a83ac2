"""Sums of products of floats, for processors with AVX-512: some rows by 48 outputs at a time.

A compiler does not keep such a tile in registers by itself, so the innermost loop is written in the
compiler's language. An output is one chain of fused products in the order of its inputs, whatever
the height of the tile: a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenpod.kernels.compiled.loops import LINE, prefetch

#: Outputs that a register holds, and outputs of a panel of the weight, which three hold.
LANES, PANEL = 16, 48
#: The kinds of numbers of a weight and of results.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

#: Rows of a tile, by its panels: what registers hold.
HEIGHTS = {1: (8, 6, 4, 3, 2, 1), 2: (2, 1)}
#: Bytes: so far ahead two panels of 16 bits ask for what they read, which few rows wait for. Those
#: of float32 are read as fast without.
AHEAD = 4096

_FLOAT, _INT64, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_HALVES = ir.VectorType(ir.IntType(16), LANES)
_FLOAT16S = ir.VectorType(ir.HalfType(), LANES)
_REGISTERS = range(PANEL // LANES)


@functools.cache
def available() -> bool:
    """Whether this processor has registers of 512 bits."""
    return bool(llvm.get_host_cpu_features().get("avx512f"))


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies 16-bit numbers of a type without widening them."""
    names = {torch.bfloat16: ("avx512bf16", "amx-bf16"), torch.float16: ("avx512fp16", "amx-fp16")}
    features = llvm.get_host_cpu_features()
    return any(features.get(name) for name in names.get(dtype, ()))


@intrinsic(prefer_literal=True)
def tile(
    typing_context: Any,
    panels: Any,
    kind: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    weight: Any,
    panel_stride: Any,
    inputs: Any,
    total: Any,
    ahead: Any,
    widened: Any,
) -> Any:
    """Go on with the sums of some rows and panels; constants, then addresses and counts, int64.

    - panels, kind: constants; the second is of the weight's numbers;
    - rows: how many, one of HEIGHTS of so many panels;
    - x, its stride: rows of float32, so many bytes apart;
    - weight, its stride: of each panel [inputs, 48], panels so many bytes apart;
    - inputs: how many are summed;
    - total [rows, panels, 48] float32, with which the sums begin and where they end;
    - ahead: where what is read next begins: 64 bytes of it are fetched for each input. Two panels
      of 16 bits fetch what lies AHEAD instead;
    - widened [inputs, 48] float32: where a weight of 16 bits is written as it is multiplied with
      the highest tile, for those behind it.
    """
    del typing_context, rows, x, x_stride, weight, panel_stride, inputs, total, ahead, widened
    constants = (panels, kind)
    if not all(isinstance(each, types.IntegerLiteral) for each in constants):
        return None
    width, of = (each.literal_value for each in constants)

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        for height in HEIGHTS[width]:
            with builder.if_then(builder.icmp_signed("==", operands[2], _number(height))):
                _sum(builder, operands[3:], height, width, of)
        return context.get_dummy_value()

    return types.void(*constants, *[types.int64] * 9), generate


@intrinsic(prefer_literal=True)
def finish(
    typing_context: Any,
    adds: Any,
    kind: Any,
    rows: Any,
    total: Any,
    total_stride: Any,
    offset: Any,
    y: Any,
    y_stride: Any,
) -> Any:
    """Take the sums of a panel, and begin anew; of constants, then addresses and counts, int64.

    - adds, kind: constants: whether results are added to what is there, and their numbers' kind;
    - rows: how many;
    - total, its stride: [48] float32 each, so many bytes apart; 0 afterwards;
    - offset [48] float32, which is added;
    - y, its stride: [48] results each, so many bytes apart.
    """
    del typing_context, rows, total, total_stride, offset, y, y_stride
    if not all(isinstance(each, types.IntegerLiteral) for each in (adds, kind)):
        return None
    into, of = adds.literal_value, kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        _finish(builder, operands[2:], of, adds=bool(into))
        return context.get_dummy_value()

    return types.void(adds, kind, *[types.int64] * 6), generate


def _sum(builder: Any, operands: Any, height: int, width: int, kind: int) -> None:
    x, x_stride, weight, panel_stride, inputs, total, ahead, widened = operands
    keeps = kind != FLOAT32 and height == HEIGHTS[1][0]
    size, across = _size(kind), width * len(_REGISTERS)
    places = [_at(builder, total, i * LANES * 4) for i in range(height * across)]
    sums = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
    for own, place in zip(sums, places, strict=True):
        builder.store(_load(builder, place, _FLOATS), own)
    rows = [builder.add(x, builder.mul(x_stride, _number(row))) for row in range(height)]
    panels = [builder.add(weight, builder.mul(panel_stride, _number(p))) for p in range(width)]
    kinds = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kinds, "llvm.fma.v16f32")
    with cgutils.for_range(builder, inputs, intp=_INT64) as loop:
        there = builder.mul(loop.index, _number(PANEL * size))
        beside = [builder.add(panel, there) for panel in panels]
        weights = [
            _read(builder, _at(builder, panel, i * LANES * size), kind)
            for panel in beside
            for i in _REGISTERS
        ]
        if keeps:
            own = builder.add(widened, builder.mul(loop.index, _number(PANEL * 4)))
            for i in _REGISTERS:
                _store(builder, weights[i], _at(builder, own, i * LANES * 4))
        if width == 1:
            prefetch(builder, builder.add(ahead, builder.mul(loop.index, _number(LINE))))
        elif kind != FLOAT32:
            for panel in beside:
                prefetch(builder, _at(builder, panel, AHEAD))
        step = builder.mul(loop.index, _number(4))
        for row in range(height):
            value = _spread(builder, _load(builder, builder.add(rows[row], step), _FLOAT))
            for at in range(across):
                own = sums[row * across + at]
                builder.store(builder.call(fused, [value, weights[at], builder.load(own)]), own)
    for own, place in zip(sums, places, strict=True):
        _store(builder, builder.load(own), place)


def _finish(builder: Any, operands: Any, kind: int, *, adds: bool) -> None:
    rows, total, total_stride, offset, y, y_stride = operands
    nothing = ir.Constant(_FLOATS, [0.0] * LANES)
    more = [_load(builder, _at(builder, offset, i * LANES * 4), _FLOATS) for i in _REGISTERS]
    with cgutils.for_range(builder, rows, intp=_INT64) as loop:
        own = builder.add(total, builder.mul(loop.index, total_stride))
        into = builder.add(y, builder.mul(loop.index, y_stride))
        for i in _REGISTERS:
            place = _at(builder, own, i * LANES * 4)
            there = _at(builder, into, i * LANES * _size(kind))
            value = builder.fadd(_load(builder, place, _FLOATS), more[i])
            if adds:
                value = builder.fadd(_read(builder, there, kind), value)
            _write(builder, value, there, kind)
            _store(builder, nothing, place)


def _read(builder: Any, address: Any, kind: int) -> Any:
    """16 numbers of a kind as float32."""
    if kind == FLOAT32:
        return _load(builder, address, _FLOATS)
    if kind == FLOAT16:
        return builder.fpext(_load(builder, address, _FLOAT16S), _FLOATS)
    whole = builder.zext(_load(builder, address, _HALVES), _WORDS)
    return builder.bitcast(builder.shl(whole, _words(16)), _FLOATS)


def _write(builder: Any, value: Any, address: Any, kind: int) -> None:
    """16 float32 as numbers of a kind, rounded to the nearest, to even in ties."""
    if kind == FLOAT16:
        value = builder.fptrunc(value, _FLOAT16S)
    elif kind == BFLOAT16:
        whole = builder.bitcast(value, _WORDS)
        odd = builder.and_(builder.lshr(whole, _words(16)), _words(1))
        rounded = builder.add(builder.add(whole, odd), _words(0x7FFF))
        is_number = builder.fcmp_ordered("ord", value, value)
        upper = builder.select(is_number, builder.lshr(rounded, _words(16)), _words(0x7FC0))
        value = builder.trunc(upper, _HALVES)
    _store(builder, value, address)


def _size(kind: int) -> int:
    """Bytes of a number."""
    return 4 if kind == FLOAT32 else 2


def _spread(builder: Any, value: Any) -> Any:
    """The same number 16 times."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    alone = builder.insert_element(nothing, value, _WORD(0))
    return builder.shuffle_vector(alone, nothing, _words(0))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _at(builder: Any, address: Any, further: int) -> Any:
    return builder.add(address, _number(further))


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _number(value: int) -> Any:
    return ir.Constant(_INT64, value)
