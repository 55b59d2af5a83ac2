"""Embedding, norms and the gated unit: computed in float32, returned in the input's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from tokenpod.kernels.operations.pointwise_ops import Activation, AddToRows


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: functional.relu,
    Activation.RELU_SQUARED: _relu_squared,
}

#: Of `Activation.SWIGLU_CLAMPED`.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


def embed(
    table: torch.Tensor,
    t_token: torch.Tensor,
    add: AddToRows | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Rows of the table [V, n] by tokens [T]: [T, n]."""
    x = table.index_select(0, t_token).to(dtype or table.dtype)
    if add is not None:
        add(x, t_token)
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Rows of x divided by the root of their mean square, times weight [n]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    # Rounded before the weight is applied, as in the models' own training code.
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Rows of x less their mean, divided by their deviation, times weight [n] plus bias [n]."""
    if weight is None or weight.dtype == x.dtype:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    wide = None if bias is None else bias.to(weight.dtype)
    return functional.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, wide, epsilon).to(
        x.dtype
    )


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation of each number."""
    return ACTIVATIONS[activation](x)


def act_mul(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Activation(gate) · up [T, n] of both beside each other [T, 2n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.SWIGLU_CLAMPED:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return ACTIVATIONS[activation](gate) * up
