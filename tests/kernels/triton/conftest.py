"""Triton kernels run compiled where there is a GPU, and interpreted elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _let_scalars_bound_loops() -> None:
    """Triton 3.6's interpreter holds scalars as [1] arrays, which NumPy 2.4 no longer converts."""
    patch = interpreter._patch_lang_tensor

    def patch_and_convert(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_convert


def _let_dots_take_bfloat16() -> None:
    """Triton 3.6's interpreter holds bfloat16 as bits, and would multiply those."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def multiply_widened(self, a, b, *args):
        return multiply(self, widened(a), widened(b), *args)

    interpreter.InterpreterBuilder.create_dot = multiply_widened


_let_scalars_bound_loops()
_let_dots_take_bfloat16()


@pytest.fixture(scope="session")
def device():
    """Where kernels run."""
    return DEVICE


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Whatever is made empty is full of NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
