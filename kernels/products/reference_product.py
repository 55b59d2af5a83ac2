"""The product with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.operations.ops import Linear


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The product x · weightᵀ + bias with a weight [out, in]."""

    return lambda x: functional.linear(x, weight, bias)
