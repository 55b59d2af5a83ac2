"""The product with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Linear


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """See `ops.PrepareLinear`."""

    def linear(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        y = functional.linear(x, weight, bias)
        return y if delta is None else y + delta

    return linear
