"""Norms and the gated unit: one pass over memory each, rows shared out among the team."""

from __future__ import annotations

import numpy as np
import torch

from tokenpod.kernels.cpu import pointwise as cpu
from tokenpod.kernels.cpu.compiled.arithmetic import LOG2_E, exp2
from tokenpod.kernels.cpu.compiled.loops import (
    END,
    FIRST,
    arguments,
    bits,
    floats,
    inlined,
    loop,
    real,
    take,
)
from tokenpod.kernels.ops import Activation

_F = np.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `ops.RmsNorm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _norm(rows, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, bits(epsilon))
    return out


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `ops.ActMul`."""
    if activation is not Activation.SILU:
        return cpu.act_mul(gate_up, activation)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width))
    _silu_mul(rows, gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


@inlined()
def norm_factor(square_sum, width, epsilon):
    """What a row is multiplied by, from the sum of its squares."""
    return _F(1) / np.sqrt(square_sum / _F(width) + epsilon)


@loop
def _norm(address):
    a = arguments(address)
    rows, width, epsilon = a[FIRST + 3], a[FIRST + 4], real(a, FIRST + 5)
    x = floats(a[FIRST], (rows, width))
    weight = floats(a[FIRST + 1], (width,))
    out = floats(a[FIRST + 2], (rows, width))
    row = take(a)
    while row < a[END]:
        square_sum = _F(0)
        for i in range(width):
            square_sum += x[row, i] * x[row, i]
        factor = norm_factor(square_sum, width, epsilon)
        for i in range(width):
            out[row, i] = x[row, i] * factor * weight[i]
        row = take(a)


@loop
def _silu_mul(address):
    a = arguments(address)
    rows, width = a[FIRST + 2], a[FIRST + 3]
    gate_up = floats(a[FIRST], (rows, 2, width))
    out = floats(a[FIRST + 1], (rows, width))
    row = take(a)
    while row < a[END]:
        for i in range(width):
            gate = gate_up[row, 0, i]
            out[row, i] = gate / (_F(1) + exp2(-gate * LOG2_E)) * gate_up[row, 1, i]
        row = take(a)
