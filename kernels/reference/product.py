"""The product with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Linear


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """See `ops.PrepareLinear`."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return linear
