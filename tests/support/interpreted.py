"""Where Triton kernels are tested: on a GPU if there is one, or else interpreted on the CPU."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

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

    def patch_attribute(obj, name, member, builder, scope):
        """A builtin without the check that it is given what it is always given here."""
        called = getattr(member, "__wrapped__", None)
        if called is None:
            patch_builtin(obj, name, member, builder, scope)
            return

        def builtin(*args, _semantic=None, **more):
            del _semantic
            return called(*args, **more, _semantic=interpreter.interpreter_semantic)

        scope.set_attr(obj, name, builtin)

    @functools.cache
    def patch_once():
        patch(language)
        tl.sort = _sort

    def patched(fn):
        del fn
        patch_once()
        return done

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang = patched


def _sort(x, dim=None, descending=False):
    """As `tl.sort`, by NumPy: Triton's takes 50 operations for each pair of steps."""
    assert dim is None or dim == len(x.shape) - 1
    numbers = np.sort(x.handle.data, axis=-1)
    numbers = np.flip(numbers, axis=-1) if descending else numbers
    return tl.tensor(interpreter.TensorHandle(numbers, x.dtype), x.type)


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

    def init_tensor(self, handle, type):
        known = tensors.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            tensors[type.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
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


def _leave_equal_operands() -> None:
    """Operands of one type need neither a cast nor a broadcast, which takes long to find out."""
    semantic = type(interpreter.interpreter_semantic)
    make_alike = semantic.binary_op_type_checking_impl
    halves = (tl.float16, tl.bfloat16)

    def operands(self, lhs, rhs, *more, **named):
        if isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor):
            # Halves are divided in float32, and pointers may be forbidden.
            same = lhs.type.name == rhs.type.name
            if same and not lhs.dtype.is_ptr() and lhs.dtype not in halves:
                return lhs, rhs
        return make_alike(self, lhs, rhs, *more, **named)

    semantic.binary_op_type_checking_impl = operands


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
_patch_once()
_leave_out_what_is_dropped()
_look_types_up_once()
_know_shapes()
_compare_types_by_name()
_leave_equal_operands()
if INTERPRETED:
    _copy_no_arguments()
