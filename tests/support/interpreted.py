"""Where Triton kernels are tested: on a GPU if there is one, or else interpreted on the CPU."""

from __future__ import annotations

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


def _patch_once_a_launch() -> None:
    """Triton 3.6's interpreter patches its language at each call of a function, at 3 ms a time."""
    patch = interpreter._patch_lang
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patched: list[object] = []

    def patch_once(fn):
        if patched:
            return patched[0]
        scope = patch(language)
        restore = scope.restore

        def restore_and_forget():
            patched.clear()
            restore()

        scope.restore = restore_and_forget
        patched.append(scope)
        return scope

    interpreter._patch_lang = patch_once


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
_patch_once_a_launch()
_leave_out_what_is_dropped()
_look_types_up_once()
