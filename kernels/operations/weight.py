"""Weights of products, whatever their numbers are stored as."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch.nn import functional


class QuantisedWeight(ABC):
    """A weight [out, in] in a format of fewer bits. A subclass is a format, in its own module.

    Subclasses are frozen dataclasses whose fields are the tensors that a rank keeps, and numbers
    such as how many inputs share a scale. A format that rounds what it multiplies overrides
    `rounded_inputs` too.
    """

    #: Whether each output's numbers are made without those of others: then a rank reads no more
    #: outputs than it keeps.
    outputs_apart = True

    @classmethod
    @abstractmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """The nearest to a dense weight [out, in] float32."""

    @staticmethod
    @abstractmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """What these outputs and inputs of a weight take at most, before it is read."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """Parts below each other as one weight; None: each needs a launch of its own."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """The rows of these numbers ([n] int64, or a slice), in this order."""

    @abstractmethod
    def inputs(self, part: range) -> Self:
        """The columns `part`, which may begin and end inside a group."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`, computed in float32 and rounded once."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def rounded_inputs(self, x: torch.Tensor) -> torch.Tensor:
        """X [T, in] as a product multiplies it: the same, or rounded; of any float type."""
        return x

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """X [T, in] · weightᵀ + bias, summed in float32 and rounded once.

        Every path makes products so until it has a kernel for the format.
        """
        exact = torch.promote_types(x.dtype, torch.float32)
        y = functional.linear(self.rounded_inputs(x).to(exact), self.dequantised(exact))
        if bias is not None:
            y += bias
        return y.to(x.dtype)


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights [experts, out, in] of one format: the experts' rows lie below each other.

    So whatever is true of a format's rows is true of a stack of them: how it is cut, what it
    takes, what its numbers stand for.
    """

    #: [experts · out, in]
    rows: QuantisedWeight
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs of each, inputs."""
        rows, inputs = self.rows.shape
        return self.experts, rows // self.experts, inputs

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.rows.nbytes

    def numel(self) -> int:
        """Numbers of the weight, however they are stored."""
        return math.prod(self.shape)

    def expert(self, number: int) -> QuantisedWeight:
        """One expert's weight [out, in]."""
        outputs = self.shape[1]
        return self.rows.outputs(slice(number * outputs, (number + 1) * outputs))

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[experts, out, in] as `dtype`, one expert at a time in float32."""
        each = (self.expert(number).dequantised(dtype) for number in range(self.experts))
        first = next(each)
        whole = torch.empty((self.experts, *first.shape), dtype=dtype, device=first.device)
        whole[0] = first
        for number, weight in enumerate(each, 1):
            whole[number] = weight
        return whole


#: What one part's numbers are: a tensor [rows, in] as it is, or a format of fewer bits.
Stored = torch.Tensor | QuantisedWeight


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out, in], in parts that lie below each other and may differ in format."""

    parts: tuple[Stored, ...]

    @property
    def dense(self) -> torch.Tensor | None:
        """The weight itself [out, in], if it is one tensor."""
        first = self.parts[0]
        return first if len(self.parts) == 1 and isinstance(first, torch.Tensor) else None

    def numel(self) -> int:
        """Numbers of the weight, however they are stored."""
        return sum(math.prod(part.shape) for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.nbytes for part in self.parts)
