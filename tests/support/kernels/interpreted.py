"""Where Triton kernels are tested: on a GPU if there is one, or else interpreted on the CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from support.kernels.quick_operations import quick_operations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: A program of a kernel takes milliseconds then: tests launch few.
INTERPRETED = DEVICE.type == "cpu"


def _let_scalars_bound_loops() -> None:
    """Triton 3.6's interpreter holds scalars as [1] arrays, which NumPy 2.4 no longer converts."""
    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_convert


def _patch_once() -> None:
    """Triton 3.6's interpreter patches its language at each launch and call, at 3 ms a time.

    Nothing here compiles kernels in a process that interprets them, so it may stay patched.
    """
    patch, patch_builtin = interpreter._patch_lang, interpreter._patch_attr
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    done = SimpleNamespace(restore=lambda: None)
    quick = quick_operations()

    def same(builtin):
        return builtin

    def patch_attribute(obj, name, member, builder, scope):
        """A builtin without the check that it is given what it is always given here."""
        called = getattr(member, "__wrapped__", None)
        if called is None:
            patch_builtin(obj, name, member, builder, scope)
            return

        def builtin(*args, _semantic=None, **more):
            del _semantic
            return called(*args, **more, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(obj, name, quick.get((obj, name), same)(builtin))

    @functools.cache
    def patch_once():
        patch(language)

    def patched(fn):
        del fn
        patch_once()
        return done

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang = patched


def _leave_out_what_is_dropped() -> None:
    """Triton's interpreter computes sums and products once more to assert that none overflows.

    The assertion itself is dropped outside of debugging: this leaves a third of the time.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _look_types_up_once() -> None:
    """Triton's interpreter makes its table of NumPy's types for each number."""
    look_up = interpreter._get_np_dtype
    known: dict[str, object] = {}

    def look_up_once(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = look_up_once


def _know_shapes() -> None:
    """Triton's types spell out their names, and each tensor makes constants of its shape anew."""
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[object, dict[str, object]] = {}
    tensors: dict[object, tuple[object, object]] = {}

    def init_block(self, element_ty, shape):
        plain = tuple(getattr(n, "value", n) for n in shape)
        key = element_ty.name, plain
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(known)

    def init_tensor(self, handle, kind):
        known = tensors.get(kind.name)
        if known is None:
            make_tensor(self, handle, kind)
            tensors[kind.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = known

    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor


def _compare_types_by_name() -> None:
    """Names of scalar types are theirs alone."""

    def equal(self, other):
        if self is other:
            return True
        other = getattr(other, "value", other)  # of a constexpr
        return isinstance(other, tl.dtype) and self.name == other.name

    tl.dtype.__eq__ = equal


def _prepare_operands_quickly() -> None:
    """What an operation makes of its operands takes longer to find out than the operation itself.

    Operands of one scalar type need no cast; a number beside a tensor is the same constant again.
    """
    semantic = type(interpreter.interpreter_semantic)
    prepare, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    # In which products and quotients are of another type.
    halves = (tl.float16, tl.bfloat16)

    @functools.lru_cache(4096)
    def constant(number, kind, block, scalar, more):
        """The second operand beside any tensor of this type; None: the tensor is cast as well."""
        del kind  # True, 1 and 1.0 are equal
        of = tl.block_type(scalar, block) if block else scalar
        handle = interpreter.TensorHandle(np.zeros(block or 1, look_up(scalar)), scalar)
        tensor = tl.tensor(handle, of)
        left, right = prepare(interpreter.interpreter_semantic, tensor, number, *more)
        return right if left is tensor else None

    look_up = interpreter._get_np_dtype

    def prepare_quickly(self, lhs, rhs, *more, **named):
        if not isinstance(lhs, tl.tensor) or lhs.dtype.is_ptr() or lhs.dtype in halves or named:
            return prepare(self, lhs, rhs, *more, **named)
        if isinstance(rhs, tl.tensor):
            if lhs.dtype.name == rhs.dtype.name:
                return broadcast_quickly(self, lhs, rhs)
        elif isinstance(rhs, (int, float)):
            block = tuple(lhs.type.shape.values) if lhs.type.is_block() else ()
            right = constant(rhs, type(rhs), block, lhs.dtype, more)
            if right is not None:
                return lhs, right
        return prepare(self, lhs, rhs, *more, **named)

    def broadcast_quickly(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block():
            left, right = lhs.type.shape.values, rhs.type.shape.values
            if left == right:
                return lhs, rhs
            pairs = [*zip(left, right, strict=False)]
            if len(left) == len(right) and all(1 in pair or pair[0] == pair[1] for pair in pairs):
                shape = [*map(max, pairs)]
                return grown(lhs, left, shape), grown(rhs, right, shape)
        return broadcast(self, lhs, rhs)

    def grown(tensor, shape, wanted):
        if shape == wanted:
            return tensor
        # A comparison's handle has the type of what was compared.
        handle = interpreter.interpreter_builder.create_broadcast(tensor.handle, wanted)
        return tl.tensor(handle, tl.block_type(tensor.dtype, wanted))

    semantic.binary_op_type_checking_impl = prepare_quickly
    semantic.broadcast_impl_value = broadcast_quickly


def _copy_no_arguments() -> None:
    """A CPU's tensors are where the interpreter works: Triton copies each storage onto itself."""
    executor = interpreter.GridExecutor
    executor._init_args_hst = lambda self, args, more: (args, more)
    executor._restore_args_dev = lambda self, *arguments: None


#: What torch rounds to, and the type of its bits.
_ROUNDED = {
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    tl.bfloat16: (torch.bfloat16, np.uint16),
}


def _round_as_torch() -> None:
    """Round float32 to the nearest number.

    Triton's interpreter cuts off what bfloat16 does not hold, and loses the carry where rounding to
    e4m3 reaches the next power of two.
    """
    convert = interpreter._convert_float

    def convert_as_torch(numbers, from_type, to_type, rounding):
        if from_type != tl.float32 or to_type not in _ROUNDED:
            return convert(numbers, from_type, to_type, rounding)
        dtype, bits = _ROUNDED[to_type]
        rounded = torch.from_numpy(numbers.copy()).to(dtype)
        return rounded.view(torch.uint8).numpy().view(bits).reshape(numbers.shape)

    interpreter._convert_float = convert_as_torch


_let_scalars_bound_loops()
_round_as_torch()
# What follows would be in the way of the compiler, which has the same types.
if INTERPRETED:
    _patch_once()
    _leave_out_what_is_dropped()
    _look_types_up_once()
    _know_shapes()
    _compare_types_by_name()
    _prepare_operands_quickly()
    _copy_no_arguments()
