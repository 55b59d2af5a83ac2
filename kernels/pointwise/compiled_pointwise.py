"""Embedding, norms and the gated unit: one pass over memory each, rows shared among the team."""

from __future__ import annotations

import functools

import numpy as np
import torch

from tokenpod.kernels.compiled.arithmetic import LOG2_E, exp2
from tokenpod.kernels.compiled.kinds import KINDS, narrow, tensor, wide
from tokenpod.kernels.compiled.loops import (
    END,
    FIRST,
    Loop,
    arguments,
    bits,
    inlined,
    integers,
    loop,
    real,
    take,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, AddToRows
from tokenpod.kernels.pointwise import reference_pointwise as reference

_F = np.float32


def embed(
    table: torch.Tensor,
    t_token: torch.Tensor,
    add: AddToRows | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows of the table [V, n] by tokens [T]: [T, n]."""
    table, t_token = table.contiguous(), t_token.contiguous()
    assert t_token.dtype is torch.int64, t_token.dtype
    (vocabulary, width), tokens = table.shape, len(t_token)
    x = table.new_empty((tokens, width), dtype=dtype)
    _embed(table.dtype, x.dtype)(
        tokens, table.data_ptr(), t_token.data_ptr(), x.data_ptr(), tokens, vocabulary, width
    )
    if add is not None:
        add(x, t_token)
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x divided by the root of their mean square, times weight [n]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    _norm(x.dtype, weight.dtype)(
        rows, x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, bits(epsilon)
    )
    return out


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation(gate) · up [T, n] of both beside each other [T, 2n]."""
    if activation is Activation.SWIGLU_CLAMPED:
        return reference.act_mul(gate_up, activation)
    if activation is not Activation.SILU:
        gate, up = gate_up.chunk(2, dim=-1)
        return reference.activate(gate, activation).mul_(up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype)
    _silu_mul(gate_up.dtype)(rows, gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


@inlined()
def norm_factor(square_sum, width, epsilon):
    """What a row is multiplied by, from the sum of its squares."""
    return _F(1) / np.sqrt(square_sum / _F(width) + epsilon)


@functools.cache
def _embed(dtype: torch.dtype, row_dtype: torch.dtype) -> Loop:
    """The loop for a table of `dtype`, and rows of the same or of float32."""
    kind, row_kind = KINDS[dtype], KINDS[row_dtype]

    def body(address):
        a = arguments(address)
        tokens, vocabulary, width = a[FIRST + 3], a[FIRST + 4], a[FIRST + 5]
        table = tensor(a[FIRST], (vocabulary, width), kind)
        t_token = integers(a[FIRST + 1], (tokens,))
        x = tensor(a[FIRST + 2], (tokens, width), row_kind)
        token = take(a)
        while token < a[END]:
            # Of a token that is none any row will do, but memory beyond the table will not.
            row = max(min(t_token[token], vocabulary - 1), 0)
            for i in range(width):
                x[token, i] = narrow(wide(table[row, i]), row_kind)
            token = take(a)

    return loop(body)


@functools.cache
def _norm(dtype: torch.dtype, weight_dtype: torch.dtype) -> Loop:
    """The loop for rows of `dtype`; see `ops.RmsNorm` for what is rounded when."""
    kind, weight_kind, rounds = KINDS[dtype], KINDS[weight_dtype], weight_dtype == dtype

    def body(address):
        a = arguments(address)
        rows, width, epsilon = a[FIRST + 3], a[FIRST + 4], real(a, FIRST + 5)
        x = tensor(a[FIRST], (rows, width), kind)
        weight = tensor(a[FIRST + 1], (width,), weight_kind)
        out = tensor(a[FIRST + 2], (rows, width), kind)
        row = take(a)
        while row < a[END]:
            square_sum = _F(0)
            for i in range(width):
                square_sum += wide(x[row, i]) * wide(x[row, i])
            factor = norm_factor(square_sum, width, epsilon)
            for i in range(width):
                y = wide(x[row, i]) * factor
                if rounds:
                    y = wide(narrow(y, kind))
                out[row, i] = narrow(y * wide(weight[i]), kind)
            row = take(a)

    return loop(body)


@functools.cache
def _silu_mul(dtype: torch.dtype) -> Loop:
    """The loop for numbers of `dtype`."""
    kind = KINDS[dtype]

    def body(address):
        a = arguments(address)
        rows, width = a[FIRST + 2], a[FIRST + 3]
        gate_up = tensor(a[FIRST], (rows, 2, width), kind)
        out = tensor(a[FIRST + 1], (rows, width), kind)
        row = take(a)
        while row < a[END]:
            for i in range(width):
                gate = wide(gate_up[row, 0, i])
                active = gate / (_F(1) + exp2(-gate * LOG2_E))
                out[row, i] = narrow(active * wide(gate_up[row, 1, i]), kind)
            row = take(a)

    return loop(body)
