"""What a compiler does not make of plain loops by itself: sums that stay in vector registers.

Vectors have 16 float32: a register of processors with AVX-512, two of others.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenpod.kernels.compiled.arithmetic import EXP2_TERMS

#: Numbers of a vector, and their bytes.
LANES, BYTES = 16, 64
#: Rows that `add_rows` sums up, and vectors of them: there are registers for few, and for many.
ROWS, FEW, MANY = (8, 2, 3) if llvm.get_host_cpu_features().get("avx512f") else (4, 1, 1)

_FLOAT, _INT64, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)


@intrinsic(prefer_literal=True)
def add_rows(
    typing_context: Any,
    vectors: Any,
    begins: Any,
    factors: Any,
    factor_stride: Any,
    rows: Any,
    row_stride: Any,
    many: Any,
    sums: Any,
    sum_stride: Any,
) -> Any:
    """Add to ROWS rows of sums the multiples of `many` rows, of all so many vectors.

    Constants, then addresses of float32 and counts, int64; strides are bytes.

    - vectors: of a row of sums, and of each row that is added;
    - begins: whether sums begin with 0, else with what is there;
    - factors, their stride: ROWS rows of `many` numbers;
    - rows, their stride: what is multiplied and added;
    - sums, their stride: ROWS rows.
    """
    del typing_context, factors, factor_stride, rows, row_stride, many, sums, sum_stride
    if not all(isinstance(each, types.IntegerLiteral) for each in (vectors, begins)):
        return None
    width, anew = vectors.literal_value, bool(begins.literal_value)

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del signature
        _add_rows(builder, operands[2:], width, anew=anew)
        return context.get_dummy_value()

    return types.void(vectors, begins, *[types.int64] * 7), generate


@intrinsic
def highest(typing_context: Any, address: Any, vectors: Any) -> Any:
    """The highest float32 of so many vectors, one at least; NaN may count as none."""
    del typing_context, address, vectors

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        found = cgutils.alloca_once_value(builder, _load(builder, operands[0], _FLOATS))
        with cgutils.for_range(builder, operands[1], intp=_INT64) as loop:
            at = builder.add(operands[0], builder.mul(loop.index, _number(BYTES)))
            own, top = _load(builder, at, _FLOATS), builder.load(found)
            higher = builder.fcmp_ordered(">", own, top)
            builder.store(builder.select(higher, own, top), found)
        best = builder.load(found)
        half = LANES // 2
        while half:
            turned = _turned(builder, best, half)
            best = builder.select(builder.fcmp_ordered(">", best, turned), best, turned)
            half //= 2
        return builder.extract_element(best, _WORD(0))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentials(typing_context: Any, address: Any, vectors: Any, top: Any) -> Any:
    """Replace float32 x of so many vectors by 2**(x - top), as `exp2` does; the sum of these."""
    del typing_context, address, vectors, top

    def generate(context: Any, builder: Any, signature: Any, operands: Any) -> Any:
        del context, signature
        top = _spread(builder, operands[2])
        total = cgutils.alloca_once_value(builder, _constant(0.0))
        with cgutils.for_range(builder, operands[1], intp=_INT64) as loop:
            at = builder.add(operands[0], builder.mul(loop.index, _number(BYTES)))
            made = _exp2(builder, builder.fsub(_load(builder, at, _FLOATS), top))
            builder.store(made, builder.inttoptr(at, _FLOATS.as_pointer()), align=4)
            builder.store(builder.fadd(builder.load(total), made), total)
        added = builder.load(total)
        half = LANES // 2
        while half:
            added = builder.fadd(added, _turned(builder, added, half))
            half //= 2
        return builder.extract_element(added, _WORD(0))

    return types.float32(types.int64, types.int64, types.float32), generate


def _exp2(builder: Any, x: Any) -> Any:
    """See `arithmetic.exp2`."""
    for bound, beyond in ((-126.0, "<"), (127.0, ">")):
        edge = _constant(bound)
        x = builder.select(builder.fcmp_ordered(beyond, x, edge), edge, x)
    one = ir.FunctionType(_FLOATS, [_FLOATS])
    floor = cgutils.get_or_insert_function(builder.module, one, "llvm.floor.v16f32")
    whole = builder.call(floor, [builder.fadd(x, _constant(0.5))])
    r = builder.fsub(x, whole)
    p = _constant(float(EXP2_TERMS[-1]))
    for term in reversed(EXP2_TERMS[:-1]):
        p = builder.call(_fused(builder), [r, p, _constant(float(term))])
    power = builder.add(builder.fptosi(whole, _words()), ir.Constant(_words(), [127] * LANES))
    power = builder.shl(power, ir.Constant(_words(), [23] * LANES))
    return builder.fmul(p, builder.bitcast(power, _FLOATS))


def _add_rows(builder: Any, operands: Any, width: int, *, anew: bool) -> None:
    factors, factor_stride, rows, row_stride, many, sums, sum_stride = operands
    places = [
        builder.add(builder.add(sums, builder.mul(sum_stride, _number(row))), _number(i * BYTES))
        for row in range(ROWS)
        for i in range(width)
    ]
    own = [cgutils.alloca_once(builder, _FLOATS) for _ in places]
    for total, place in zip(own, places, strict=True):
        builder.store(_constant(0.0) if anew else _load(builder, place, _FLOATS), total)
    starts = [builder.add(factors, builder.mul(factor_stride, _number(r))) for r in range(ROWS)]
    fused = _fused(builder)
    with cgutils.for_range(builder, many, intp=_INT64) as loop:
        there = builder.add(rows, builder.mul(loop.index, row_stride))
        added = [
            _load(builder, builder.add(there, _number(i * BYTES)), _FLOATS) for i in range(width)
        ]
        further = builder.mul(loop.index, _number(4))
        for row, start in enumerate(starts):
            factor = _spread(builder, _load(builder, builder.add(start, further), _FLOAT))
            for i in range(width):
                total = own[row * width + i]
                builder.store(builder.call(fused, [factor, added[i], builder.load(total)]), total)
    for total, place in zip(own, places, strict=True):
        value = builder.load(total)
        builder.store(value, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)


def _fused(builder: Any) -> Any:
    """a · b + c, rounded once."""
    kinds = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return cgutils.get_or_insert_function(builder.module, kinds, "llvm.fma.v16f32")


def _turned(builder: Any, x: Any, by: int) -> Any:
    """Lanes in the place of those so many before them."""
    order = [(lane + by) % LANES for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(_words(), order))


def _spread(builder: Any, value: Any) -> Any:
    """The same number in all lanes."""
    nothing = ir.Constant(_FLOATS, ir.Undefined)
    alone = builder.insert_element(nothing, value, _WORD(0))
    return builder.shuffle_vector(alone, nothing, ir.Constant(_words(), [0] * LANES))


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _constant(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _words() -> Any:
    return ir.VectorType(_WORD, LANES)


def _number(value: int) -> Any:
    return ir.Constant(_INT64, value)
