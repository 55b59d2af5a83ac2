"""Operations of Triton's interpreter without what it finds out anew for each of them.

What Triton does with the operands of an operation (checks, casts, broadcasts, the result's type)
follows from their types. So an operation on types that come for the first time is done by Triton,
and by one of NumPy's functions besides. Where both give the same numbers, type and shape, NumPy's
function alone does it from then on: 2 µs instead of 20 to 40. What is converted implicitly, and
whatever is not here, is left to Triton.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

Operation = Callable[..., Any]

#: Scalar types whose numbers NumPy has as they are.
_PLAIN = frozenset({"fp32", "fp64", "int1", "int8", "int32", "int64", "uint8", "uint32", "uint64"})
_NUMBERS = (int, float, bool)
#: To caches, which the interpreter has not.
_HINTS = {"eviction_policy", "cache_modifier"}


#: All that has been found out, by operation.
_FOUND: list[Any] = []


#: The file whose tests run.
_OF_FILE: list[Path] = []


def forget_before(file: Path) -> None:
    """Find out anew what becomes of which types: no file depends on what others found."""
    if file not in _OF_FILE:
        _OF_FILE[:] = [file]
        for each in _FOUND:
            each.clear()


def _kept(found: Any) -> Any:
    _FOUND.append(found)
    return found


class _Like(NamedTuple):
    """How a result is made: a tensor's fields but for its handle, and its handle's type."""

    fields: dict[str, Any]
    dtype: tl.dtype
    #: Of operands that are no tensors.
    constants: tuple[Any, ...] = ()


def _like(tensor: Any, *constants: Any) -> _Like:
    fields = {name: value for name, value in vars(tensor).items() if name != "handle"}
    return _Like(fields, tensor.handle.dtype, constants)


def _made(like: _Like, data: np.ndarray) -> Any:
    handle = TensorHandle.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, like.dtype, {}
    tensor = tl.tensor.__new__(tl.tensor)
    fields = vars(tensor)
    fields.update(like.fields)
    fields["handle"] = handle
    return tensor


def _same(quick: Any, slow: np.ndarray) -> bool:
    """Bit by bit, but for the sign of zeros and what NaN holds."""
    return (
        isinstance(quick, np.ndarray)
        and (quick.dtype, quick.shape) == (slow.dtype, slow.shape)
        and np.array_equal(quick, slow, equal_nan=quick.dtype.kind == "f")
    )


def _constant(number: Any, dtype: np.dtype) -> np.ndarray | None:
    """A number as an operand beside those of a type; None: Triton converts the others instead."""
    if type(number) not in _NUMBERS or (isinstance(number, float) and dtype.kind != "f"):
        return None
    try:
        return np.array([number], dtype)
    except OverflowError:
        return None


def _unwrapped(x: Any) -> Any:
    return x.value if type(x) is tl.constexpr else x


def _is_plain(tensor: Any) -> bool:
    return tensor.dtype.name in _PLAIN


def _binary(slow: Operation, compute: Operation) -> Operation:
    """A method of tensors with one more operand."""
    known: dict[object, _Like | None] = _kept({})
    tensors, constexpr = tl.tensor, tl.constexpr

    def cast(left: np.ndarray, right: np.ndarray, into: np.dtype) -> np.ndarray:
        return compute(left.astype(into), right.astype(into))

    def operate(self: Any, other: Any, _semantic: object = None) -> Any:
        if type(other) is constexpr:
            other = other.value
        if type(other) is tensors:
            like = known.get((self.type.name, other.type.name), known)
            if like is not known:
                if like is None:
                    return slow(self, other)
                if like.constants:
                    return _made(like, cast(self.handle.data, other.handle.data, *like.constants))
                return _made(like, compute(self.handle.data, other.handle.data))
        else:
            like = known.get((self.type.name, type(other), other), known)
            if like is not known:
                if like is None:
                    return slow(self, other)
                return _made(like, compute(self.handle.data, like.constants[0]))
        return learn(self, other)

    def learn(self: Any, other: Any) -> Any:
        result = slow(self, other)
        left, wanted, like = self.handle.data, result.handle.data, None
        if type(other) is tensors:
            key: object = (self.type.name, other.type.name)
            right = other.handle.data
            if _is_plain(self) and _is_plain(other):
                if self.dtype.name == other.dtype.name:
                    if _same(compute(left, right), wanted):
                        like = _like(result)
                elif _same(cast(left, right, wanted.dtype), wanted) and wanted.dtype != np.bool_:
                    like = _like(result, wanted.dtype)
        else:
            key = self.type.name, type(other), other
            right = _constant(other, left.dtype)
            if right is not None and _is_plain(self) and _same(compute(left, right), wanted):
                like = _like(result, right)
        known[key] = like
        return result

    return operate


def _offset(slow: Operation) -> Operation:
    """The sum of pointers and integers, or of numbers."""
    numbers = _binary(slow, np.add)
    known: dict[tuple[str, str], tuple[_Like, np.uint64] | None] = _kept({})

    def operate(self: Any, other: Any, _semantic: object = None) -> Any:
        if not self.dtype.is_ptr() or type(other) is not tl.tensor:
            return numbers(self, other)
        key = self.type.name, other.type.name
        found = known.get(key, ())
        if found:
            like, size = found
            return _made(like, self.handle.data + other.handle.data.astype(np.uint64) * size)
        result = slow(self, other)
        if found is not None:
            known[key] = None
            if other.dtype.name in ("int32", "int64"):
                size = np.uint64(max(self.dtype.element_ty.primitive_bitwidth // 8, 1))
                data = self.handle.data + other.handle.data.astype(np.uint64) * size
                if _same(data, result.handle.data):
                    known[key] = _like(result), size
        return result

    return operate


def _where(slow: Operation) -> Operation:
    known: dict[object, _Like | None] = _kept({})

    def part(x: Any) -> object:
        return x.type.name if type(x) is tl.tensor else (type(x), x)

    def data(x: Any, constant: Any) -> Any:
        return x.handle.data if type(x) is tl.tensor else constant

    def where(condition: Any, x: Any, y: Any, _semantic: object = None) -> Any:
        condition, x, y = map(_unwrapped, (condition, x, y))
        if type(condition) is not tl.tensor:
            return slow(condition, x, y)
        key = condition.type.name, part(x), part(y)
        like = known.get(key, known)
        if like is None:
            return slow(condition, x, y)
        if like is not known:
            left, right = like.constants
            return _made(like, np.where(condition.handle.data, data(x, left), data(y, right)))
        result = slow(condition, x, y)
        known[key] = None
        kinds = {x.dtype.name for x in (x, y) if type(x) is tl.tensor}
        if condition.dtype.name == "int1" and len(kinds) == 1 and kinds <= _PLAIN:
            dtype = result.handle.data.dtype
            constants = [_constant(x, dtype) for x in (x, y)]
            operands = [data(x, c) for x, c in zip((x, y), constants, strict=True)]
            if not any(x is None for x in operands):
                quick = np.where(condition.handle.data, *operands)
                if _same(quick, result.handle.data):
                    known[key] = _like(result, *constants)
        return result

    return where


def _widened(bits: np.ndarray, into: np.dtype) -> np.ndarray:
    """The numbers of bfloat16's bits."""
    return (bits.astype(np.uint32) << 16).view(into)


def _to(slow: Operation) -> Operation:
    """A cast."""
    known: dict[object, tuple[_Like, Operation, np.dtype] | None] = _kept({})

    def how(source: str, wanted: str, bitcast: bool) -> Operation | None:
        if {source, wanted} <= _PLAIN | {"fp16"}:
            return np.ndarray.view if bitcast else np.ndarray.astype
        return _widened if (source, wanted, bitcast) == ("bf16", "fp32", False) else None

    def to(
        self: Any,
        dtype: Any,
        *more: Any,
        bitcast: bool = False,
        _semantic: object = None,
        **named: Any,
    ) -> Any:
        wanted = _unwrapped(dtype).name
        if more or named:
            return slow(self, dtype, *more, bitcast=bitcast, **named)
        if wanted == self.dtype.name:
            return self
        key = self.type.name, wanted, bitcast
        found = known.get(key, ())
        if found:
            like, cast, into = found
            return _made(like, cast(self.handle.data, into))
        result = slow(self, dtype, bitcast=bitcast)
        if found is not None:
            known[key] = None
            cast, into = how(self.dtype.name, wanted, bitcast), result.handle.data.dtype
            if cast and _same(cast(self.handle.data, into), result.handle.data):
                known[key] = _like(result), cast, into
        return result

    return to


def _getitem(slow: Operation) -> Operation:
    """New axes of length 1: `x[:, None]`."""
    known: dict[object, _Like] = _kept({})
    everything = slice(None)

    def getitem(self: Any, slices: Any, _semantic: object = None) -> Any:
        if type(slices) is not tuple:
            return slow(self, slices)
        key = self.type.name, *(x is None for x in slices)
        like = known.get(key)
        if like is not None and all(x is None or x == everything for x in slices):
            return _made(like, self.handle.data[slices])
        result = slow(self, slices)
        if all(x is None or x == everything for x in slices) and self.type.is_block():
            known[key] = _like(result)
        return result

    return getitem


def _cached(slow: Operation) -> Operation:
    """What depends on its arguments alone; the numbers of all results are the same memory."""
    known: dict[object, tuple[_Like, np.ndarray]] = _kept({})

    def part(x: Any) -> object:
        x = _unwrapped(x)
        if isinstance(x, tl.dtype):
            return x.name
        if isinstance(x, (list, tuple, tl.tuple)):
            return (*map(part, x),)
        return type(x), x

    def operate(*args: Any, _semantic: object = None, **named: Any) -> Any:
        if named or any(type(x) is tl.tensor for x in args):
            return slow(*args, **named)
        key = part(args)
        try:
            found = known.get(key)
        except TypeError:  # of a tensor
            return slow(*args)
        if found is None:
            result = slow(*args)
            result.handle.data.setflags(write=False)
            found = known[key] = _like(result), result.handle.data
        return _made(*found)

    return operate


def _unary(slow: Operation, compute: Operation) -> Operation:
    known: dict[str, _Like | None] = _kept({})

    def operate(x: Any, _semantic: object = None) -> Any:
        if type(x) is not tl.tensor:
            return slow(x)
        like = known.get(x.type.name, known)
        if like is None:
            return slow(x)
        if like is not known:
            return _made(like, compute(x.handle.data))
        result = slow(x)
        quick = _is_plain(x) and _same(compute(x.handle.data), result.handle.data)
        known[x.type.name] = _like(result) if quick else None
        return result

    return operate


def _function(slow: Operation, compute: Operation) -> Operation:
    """A function of two operands."""
    quick = _binary(slow, compute)

    def operate(x: Any, y: Any, _semantic: object = None, **named: Any) -> Any:
        return slow(x, y, **named) if named or type(x) is not tl.tensor else quick(x, y)

    return operate


def _program(slow: Operation, numbers: str) -> Operation:
    """Which program of a grid's axis this is, or how many there are."""
    known: list[_Like] = _kept([])
    builder = interpreter.interpreter_builder

    def program(axis: Any, _semantic: object = None) -> Any:
        if not known:
            known.append(_like(slow(axis)))
        return _made(known[0], np.array([getattr(builder, numbers)[_unwrapped(axis)]], np.int32))

    return program


class _Memory:
    """Loads and stores through tensors of pointers."""

    def __init__(self) -> None:
        self._filled: dict[object, np.ndarray] = {}

    def filled(self, shape: tuple[int, ...], number: int, dtype: Any) -> np.ndarray:
        key = shape, number, dtype
        if key not in self._filled:
            made = np.full(shape, number, dtype)
            made.setflags(write=False)
            self._filled[key] = made
        return self._filled[key]

    def mask(self, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
        if mask is None:
            return self.filled(shape, 1, np.bool_)
        data = mask.handle.data
        return data if data.shape == shape else np.broadcast_to(data, shape)

    def load(self, slow: Operation) -> Operation:
        known: dict[object, tuple[_Like, np.dtype]] = _kept({})

        def load(
            pointer: Any,
            mask: Any = None,
            other: Any = None,
            _semantic: object = None,
            **named: Any,
        ) -> Any:
            mask, other = _unwrapped(mask), _unwrapped(other)
            beside = mask.type.name if type(mask) is tl.tensor else mask
            key = pointer.type.name, beside, type(other), other
            quick = named.keys() <= _HINTS and type(other) is not tl.tensor
            found = known.get(key) if quick else None
            if found:
                like, dtype = found
                pointers = pointer.handle.data
                others = self.filled(pointers.shape, other or 0, dtype)
                on = self.mask(mask, pointers.shape)
                return _made(like, interpreter._interpreter.load(pointers, on, others, dtype))
            result = slow(pointer, mask, other, **named)
            quick = quick and pointer.dtype.is_ptr() and result.dtype.name != "int1"
            quick = quick and (not other or _is_plain(result))
            if quick and self._is_masked(pointer, mask):
                data = result.handle.data
                if not other or _constant(other, data.dtype) is not None:
                    known[key] = _like(result), data.dtype
            return result

        return load

    def store(self, slow: Operation) -> Operation:
        known: dict[object, bool] = _kept({})

        def store(
            pointer: Any, value: Any, mask: Any = None, _semantic: object = None, **named: Any
        ) -> Any:
            mask = _unwrapped(mask)
            tensors = type(pointer) is type(value) is tl.tensor and not named
            if tensors and (mask is None or type(mask) is tl.tensor):
                key = pointer.type.name, value.type.name, mask is not None and mask.type.name
                quick = known.get(key)
                if quick is None:
                    quick = known[key] = self._is_plain_store(pointer, value, mask)
                if quick:
                    pointers, data = pointer.handle.data, value.handle.data
                    if data.shape != pointers.shape:
                        data = np.broadcast_to(data, pointers.shape)
                    on = self.mask(mask, pointers.shape)
                    interpreter._interpreter.store(pointers, data, on)
                    return None
            return slow(pointer, value, mask, **named)

        return store

    def _is_plain_store(self, pointer: Any, value: Any, mask: Any) -> bool:
        """Whether nothing is converted, and all is as large as the pointers are."""
        return (
            pointer.dtype.is_ptr()
            and pointer.dtype.element_ty.name == value.dtype.name != "int1"
            and self._fits(pointer, value)
            and self._is_masked(pointer, mask)
        )

    def _is_masked(self, pointer: Any, mask: Any) -> bool:
        if mask is None:
            return True
        return type(mask) is tl.tensor and mask.dtype.name == "int1" and self._fits(pointer, mask)

    def _fits(self, pointer: Any, operand: Any) -> bool:
        """Or is a scalar."""
        return operand.handle.data.shape in (pointer.handle.data.shape, (1,))


def _reflected(compute: Operation) -> Operation:
    return lambda right, left: compute(left, right)


def _floor(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """To zero, as processors divide integers."""
    return (left - np.fmod(left, right)) // right


_BINARY: dict[str, Operation] = {
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _floor,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = {name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "sqrt")}


def quick_operations() -> dict[tuple[object, str], Callable[[Operation], Operation]]:
    """By where Triton has them (object and name): what makes the quick one of Triton's."""
    memory = _Memory()
    made: dict[tuple[object, str], Callable[[Operation], Operation]] = {
        (tl.tensor, "__add__"): _offset,
        (tl.tensor, "__radd__"): lambda slow: _binary(slow, _reflected(np.add)),
        (tl.tensor, "__neg__"): lambda slow: _unary(slow, np.negative),
        (tl.tensor, "to"): _to,
        (tl.tensor, "__getitem__"): _getitem,
    }

    def binary(name: str, compute: Operation) -> None:
        made[tl.tensor, name] = lambda slow: _binary(slow, compute)

    for name, compute in _BINARY.items():
        binary(f"__{name}__", compute)
        binary(f"__r{name}__", _reflected(compute))
    for name in _COMPARISONS:
        binary(f"__{name}__", getattr(operator, name))
    for module in (tl, tl.core):
        made[module, "where"] = _where
        made[module, "program_id"] = lambda slow: _program(slow, "grid_idx")
        made[module, "num_programs"] = lambda slow: _program(slow, "grid_dim")
        made[module, "minimum"] = lambda slow: _function(slow, np.minimum)
        made[module, "maximum"] = lambda slow: _function(slow, np.maximum)
        made[module, "arange"] = made[module, "full"] = _cached
        made[module, "load"], made[module, "store"] = memory.load, memory.store
    for module in (tl, tl.math):
        for name, compute in _UNARY.items():
            made[module, name] = lambda slow, compute=compute: _unary(slow, compute)
    return made
