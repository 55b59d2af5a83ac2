"""The product with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Int8Weight, Linear


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """See `ops.PrepareLinear`."""

    def linear(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        y = functional.linear(x, weight, bias)
        return y if delta is None else y + delta

    return linear


def prepare_int8_linear(weight: Int8Weight, bias: torch.Tensor | None) -> Linear:
    """See `ops.PrepareInt8Linear`."""

    def linear(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        y = functional.linear(x.to(exact), weight.weight.to(exact)) * weight.scale
        if bias is not None:
            y += bias
        return (y if delta is None else y + delta).to(x.dtype)

    return linear
