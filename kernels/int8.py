"""The format of 8 bits: a scale per output row, made of any dense weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from tokenpod.kernels.ops import Int8Weight

#: The largest multiple of a row's scale.
MOST = 127


def quantise_rows(weight: torch.Tensor) -> Int8Weight:
    """Weight [out, in] in any float type -> each row's largest number becomes ±127.

    A row that holds a number that is none, or is infinite, gets a scale that is the same, so that
    products with it show it.
    """
    wide = weight.float()
    scale = wide.abs().amax(dim=1) / MOST
    whole = wide / torch.where(scale > 0, scale, 1.0)[:, None]
    whole = whole.nan_to_num(0.0).round().clamp(-MOST, MOST)
    return Int8Weight(whole.to(torch.int8), scale)


def dequantised(weight: Int8Weight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as `dtype`, multiplied in float32 and rounded once."""
    out = torch.empty(weight.weight.shape, dtype=dtype, device=weight.weight.device)
    return torch.mul(weight.weight, weight.scale[:, None], out=out)


def multiply_widened(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """X [T, in] · weightᵀ + bias by the library, from a float copy of the weight: for many tokens.

    Whole numbers up to 127 are exact in every float type, so the scale can wait for the sum; but
    in float16 a sum of them could be too large.
    """
    if x.dtype == torch.float16:
        return functional.linear(x, dequantised(weight, x.dtype), bias)
    y = functional.linear(x, weight.weight.to(x.dtype)).float().mul_(weight.scale)
    return (y if bias is None else y.add_(bias)).to(x.dtype)
