"""Numbers of 16 bits that are multiplied as float32, which holds all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight

#: Kinds of such numbers.
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class NarrowWeight(QuantisedWeight):
    """A weight as a checkpoint stores it, for inputs and sums of float32.

    Products are those with the same numbers as float32, bit by bit, and take half the memory.
    """

    #: [out, in] bfloat16 or float16.
    numbers: torch.Tensor

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """Of a weight [out, in], rounded to bfloat16 if it has more bits."""
        return cls(weight if weight.dtype in DTYPES else weight.to(torch.bfloat16))

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """Two per number."""
        return len(outputs) * len(inputs) * torch.bfloat16.itemsize

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """All rows, if they are of one kind."""
        if len({part.numbers.dtype for part in parts}) > 1:
            return None
        return cls(torch.cat([part.numbers for part in parts]))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.numbers.shape
        return rows, columns

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """Rows, by their numbers [n] int64 or as a slice."""
        return type(self)(self.numbers[rows])

    def inputs(self, part: range) -> Self:
        """Columns."""
        return type(self)(self.numbers[:, part.start : part.stop].contiguous())

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`."""
        return self.numbers.to(dtype)
