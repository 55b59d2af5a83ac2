"""Norms, activations and the gated unit: one launch, one pass over memory, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.gpu.launcher import launched
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.pointwise import reference_pointwise as reference

#: Outputs of the gated unit that one program makes; and of an activation alone, of many tokens.
GATE_BLOCK, ACTIVATION_BLOCK = 1024, 4096
MANY_TOKENS = 64

#: Of `Activation.SWIGLU_CLAMPED`.
SWIGLU_ALPHA: tl.constexpr = tl.constexpr(reference.SWIGLU_ALPHA)
SWIGLU_LIMIT: tl.constexpr = tl.constexpr(reference.SWIGLU_LIMIT)


def named(activation: Activation | None, dtype: torch.dtype) -> str:
    """What `activated` calls it, for results of `dtype`."""
    if activation is None:
        return "none"
    short = activation is Activation.GELU and dtype.itemsize == 2
    return "gelu_short" if short else activation.value


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x divided by the root of their mean square, times weight [n]."""
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n)
    _rms_norm[(len(rows),)](
        rows,
        weight,
        out,
        rows.stride(0),
        n,
        epsilon,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(x.device),
    )
    return out.view(x.shape)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Rows of x less their mean, divided by their deviation, times weight [n] plus bias [n]."""
    out = torch.empty_like(x)
    _norm_rows(x, None, weight, bias, out, epsilon)
    return out


def add_layer_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
) -> None:
    """Change x [T, n] to the layer norm of x + y."""
    _norm_rows(x, y, weight, bias, x, epsilon)


def _norm_rows(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    epsilon: float,
) -> None:
    rows, n = x.shape
    block = triton.next_power_of_2(n)
    _layer_norm[(rows,)](
        x,
        y,
        weight,
        bias,
        out,
        x.stride(0),
        out.stride(0),
        n,
        epsilon,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **launch_options(x.device),
    )


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each number, in its place."""
    tokens, n = x.shape
    out = x.contiguous()
    block = GATE_BLOCK if tokens < MANY_TOKENS else ACTIVATION_BLOCK
    _activate[(tokens, triton.cdiv(n, block))](
        x,
        out,
        x.stride(0),
        n,
        ACTIVATION=named(activation, out.dtype),
        BLOCK=block,
        **launch_options(x.device),
    )
    return out


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation(gate) · up [T, n] of both beside each other [T, 2n]."""
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, n), dtype=gate_up.dtype, device=gate_up.device)
    _act_mul[(tokens, triton.cdiv(n, GATE_BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        n,
        ACTIVATION=named(activation, out.dtype),
        BLOCK=GATE_BLOCK,
        **launch_options(gate_up.device),
    )
    return out


@launched
@triton.jit
def _rms_norm(
    x, weight, out, x_stride, n, epsilon, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    scale = tl.load(weight + i, mask=i < n, other=0.0)
    await_inputs(OVERLAP)
    values = tl.load(x + row * x_stride + i, mask=i < n, other=0.0)
    normed = rms_normalised(values.to(tl.float32), n, epsilon)
    if scale.dtype == values.dtype:
        # Rounded before the weight is applied, as in the models' own training code.
        normed = normed.to(values.dtype).to(tl.float32)
    normed *= scale.to(tl.float32)
    tl.store(out + row * n + i, normed.to(values.dtype), mask=i < n)


@launched
@triton.jit
def _layer_norm(
    x, y, weight, bias, out, x_stride, out_stride, n, epsilon,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    values = tl.load(x + row * x_stride + i, mask=i < n, other=0.0)
    wide = values.to(tl.float32)
    if y is not None:
        wide += tl.load(y + row * n + i, mask=i < n, other=0.0).to(tl.float32)
        wide = wide.to(values.dtype).to(tl.float32)
    centred = tl.where(i < n, wide - tl.sum(wide) / n, 0.0)
    normed = rms_normalised(centred, n, epsilon)
    if weight is not None:
        normed *= tl.load(weight + i, mask=i < n, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, normed.to(values.dtype), mask=i < n)


@launched
@triton.jit
def _activate(
    x, out, stride, n, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    values = tl.load(x + row * stride + i, mask=i < n, other=0.0)
    y = activated(values.to(tl.float32), ACTIVATION)
    tl.store(out + row * n + i, y.to(values.dtype), mask=i < n)


@triton.jit
def rms_normalised(values, n, epsilon):
    """A float32 row, zero beyond its n elements, over the root of its mean square."""
    return values * tl.rsqrt(tl.sum(values * values) / n + epsilon)


@launched
@triton.jit
def _act_mul(
    gate_up,
    out,
    stride,
    n,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(OVERLAP)
    gate = tl.load(gate_up + row * stride + i, mask=i < n, other=0.0)
    up = tl.load(gate_up + row * stride + n + i, mask=i < n, other=0.0)
    gated = gated_unit(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
    tl.store(out + row * n + i, gated.to(gate.dtype), mask=i < n)


@triton.jit
def gated_unit(gate, up, ACTIVATION: tl.constexpr):
    """Activation(gate) · up [T, n] of both beside each other [T, 2n].

    Gates and what they open float32.
    """
    if ACTIVATION == "swiglu_clamped":
        # Not minima: NaN must stay NaN.
        gate = tl.where(gate > SWIGLU_LIMIT, SWIGLU_LIMIT, gate)
        up = tl.where(up > SWIGLU_LIMIT, SWIGLU_LIMIT, up)
        up = tl.where(up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, up)
        y = gate * tl.sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)
    else:
        y = activated(gate, ACTIVATION) * up
    return y


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The non-linearity of a gate, x float32."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_short":
        # Φ(x) = 1 / (1 + 2**(-x · p(x²))), p found by least squares until its largest error was
        # least. For numbers of 2 bytes: within ±5.6 it is off by 1e-4 of the result at most, a
        # twentieth of what rounding to bfloat16 is, in half of the instructions.
        square = tl.minimum(x * x, 31.36)
        power = square * -3.8277978e-11 + 5.2338704e-09
        power = square * power - 2.9509365e-07
        power = square * power + 8.6493234e-06
        power = square * power - 1.2445224e-04
        power = square * power - 2.9496524e-04
        power = square * power + 1.0531312e-01
        power = square * power + 2.3018885
        root = tl.rsqrt(1.0 + tl.exp2(-x * power))
        y = x * root * root
    elif ACTIVATION == "relu":
        # Not a maximum: NaN must stay NaN.
        y = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        y = tl.where(x < 0, 0.0, x * x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(z)) / 2 = sigmoid(2z); here 2z.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y
