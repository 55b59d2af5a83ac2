"""The format of 8 bits with an exponent (e4m3): a scale per row, per block, or for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.rounding import Number, Rounding, alike, joined

#: The largest number of the format.
MOST = Number.FP8.most
#: How products with weights that are made while loading round their inputs.
PER_TOKEN = Rounding(Number.FP8)


@dataclass(frozen=True, slots=True)
class Fp8Weight(QuantisedWeight):
    """A weight of 8 bits: a block's numbers times the block's scale."""

    #: [out, in] float8_e4m3fn
    numbers: torch.Tensor
    #: [⌈out / rows⌉, ⌈in / columns⌉] float32
    scale: torch.Tensor
    #: Outputs and inputs of a block; the last blocks may have fewer.
    rows: int
    columns: int
    #: How inputs are rounded before they are multiplied; None: they are not.
    rounding: Rounding | None = PER_TOKEN

    @classmethod
    def of(
        cls, numbers: torch.Tensor, scale: torch.Tensor, rounding: Rounding | None = PER_TOKEN
    ) -> Self:
        """Of numbers [out, in] and one scale [] or [1], or one per output, [out] or [out, 1]."""
        outputs, inputs = numbers.shape
        scales = scale.float().reshape(-1).expand(outputs).contiguous()
        return cls(numbers, scales[:, None], 1, max(inputs, 1), rounding)

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """Of a weight [out, in] of any float type; each row's largest number becomes ±448.

        A row that holds a number that is none, or is infinite, gets a scale that is the same.
        """
        scale = weight.abs().amax(dim=1).float() / MOST
        shares = weight / torch.where(scale > 0, scale, 1.0)[:, None]
        return cls.of(shares.nan_to_num(0.0).clamp(-MOST, MOST).to(torch.float8_e4m3fn), scale)

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """A byte per number and a scale per output."""
        return len(outputs) * (len(inputs) + torch.float32.itemsize)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """All rows, if their scales stand for as many inputs and their inputs are rounded alike."""
        first = parts[0]
        roundings = [part.rounding for part in parts]
        if any(part.columns != first.columns for part in parts) or not alike(roundings):
            return None
        whole = all(part.rows == first.rows for part in parts) and all(
            part.shape[0] % first.rows == 0 for part in parts[:-1]
        )
        apart = parts if whole else [part._by_row() for part in parts]
        # No library concatenates these numbers on every device; their bytes it does.
        numbers = torch.cat([part.numbers.view(torch.uint8) for part in apart])
        return cls(
            numbers.view(torch.float8_e4m3fn),
            torch.cat([part.scale for part in apart]),
            apart[0].rows,
            first.columns,
            joined(roundings),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        rows, columns = self.numbers.shape
        return rows, columns

    @property
    def by_output(self) -> bool:
        """Whether each output has one scale: then it can multiply a sum."""
        return self.rows == 1 and self.scale.shape[1] == 1

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """Rows; blocks that are cut leave each row its scale."""
        if isinstance(rows, slice) and self.rows > 1:
            first, end, _ = rows.indices(len(self.numbers))
            if not first % self.rows and (not end % self.rows or end == len(self.numbers)):
                blocks = slice(first // self.rows, -(-end // self.rows))
                return replace(self, numbers=self.numbers[first:end], scale=self.scale[blocks])
        apart = self._by_row() if self.rows > 1 else self
        numbers = apart.numbers.view(torch.uint8)[rows].view(torch.float8_e4m3fn)
        return replace(apart, numbers=numbers, scale=apart.scale[rows].contiguous())

    def inputs(self, part: range) -> Self:
        """Columns; a block that is cut makes all blocks as narrow as its parts."""
        numbers = self.numbers[:, part.start : part.stop].contiguous()
        if self.scale.shape[1] == 1:
            return replace(self, numbers=numbers, columns=max(len(part), 1))
        columns = gcd(self.columns, part.start)
        scale = self.scale.repeat_interleave(self.columns // columns, 1)
        kept = scale[:, part.start // columns : -(-part.stop // columns)].contiguous()
        return replace(self, numbers=numbers, scale=kept, columns=columns)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`."""
        outputs, inputs = self.shape
        scale = self.scale.repeat_interleave(self.rows, 0)[:outputs]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.columns, 1)[:, :inputs]
        return (self.numbers.float() * scale).to(dtype)

    def rounded_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """As `rounding` says."""
        return x if self.rounding is None else self.rounding.applied(x)

    def _by_row(self) -> Self:
        scale = self.scale.repeat_interleave(self.rows, 0)[: self.shape[0]]
        return replace(self, scale=scale, rows=1)
