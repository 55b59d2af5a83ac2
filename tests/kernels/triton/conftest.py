"""Triton kernels run compiled where there is a GPU, and interpreted elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from support.kernels.interpreted import DEVICE


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
