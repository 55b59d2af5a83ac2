"""The format of 8 bits: a scale per output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.nn import functional

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.rounding import Rounding, alike, joined

#: The largest multiple of a row's scale.
MOST = 127


@dataclass(frozen=True, slots=True)
class Int8Weight(QuantisedWeight):
    """A weight of 8 bits: row r is `numbers[r]` times `scale[r]`."""

    #: [out, in] int8, within ±127.
    numbers: torch.Tensor
    #: [out] float32
    scale: torch.Tensor
    #: How inputs are rounded before they are multiplied; None: they are not.
    rounding: Rounding | None = None

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """Of a weight [out, in] of any float type; each row's largest number becomes ±127.

        A row that holds a number that is none, or is infinite, gets a scale that is the same, so
        that products with it show it.
        """
        scale = weight.abs().amax(dim=1) / MOST
        whole = weight / torch.where(scale > 0, scale, 1.0)[:, None]
        whole = whole.nan_to_num(0.0).round().clamp(-MOST, MOST)
        return cls(whole.to(torch.int8), scale)

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """A byte per number and a scale per output."""
        return len(outputs) * (len(inputs) + torch.float32.itemsize)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """All rows' numbers and scales, if their inputs are rounded alike."""
        if not alike([part.rounding for part in parts]):
            return None
        return cls(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scale for part in parts]),
            joined([part.rounding for part in parts]),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.numbers.shape
        return rows, columns

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """Rows, by their numbers [n] int64 or as a slice, with their scales."""
        return replace(self, numbers=self.numbers[rows], scale=self.scale[rows])

    def inputs(self, part: range) -> Self:
        """Columns; scales stay those of whole rows, so that ranks have the same numbers."""
        return replace(self, numbers=self.numbers[:, part.start : part.stop].contiguous())

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.numbers.device)
        return torch.mul(self.numbers, self.scale[:, None], out=out)

    def rounded_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """As `rounding` says."""
        return x if self.rounding is None else self.rounding.applied(x)


def multiply_widened(
    x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None
) -> torch.Tensor:
    """X [T, in] · weightᵀ + bias by the library, from a float copy of the weight: for many tokens.

    Whole numbers up to 127 are exact in every float type, so the scale can wait for the sum; but
    in float16 a sum of them could be too large.
    """
    if x.dtype == torch.float16:
        return functional.linear(x, weight.dequantised(x.dtype), bias)
    y = functional.linear(x, weight.numbers.to(x.dtype)).float().mul_(weight.scale)
    return (y if bias is None else y.add_(bias)).to(x.dtype)
