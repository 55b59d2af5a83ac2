"""A weight of products, whatever its numbers are stored as."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenpod.kernels.ops import Int8Weight

#: What one part's numbers are: a tensor [rows, in] as it is, or a format of fewer bits.
Stored = torch.Tensor | Int8Weight


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A weight [out, in], in parts that lie below each other and may differ in format."""

    parts: tuple[Stored, ...]

    @property
    def dense(self) -> torch.Tensor | None:
        """The weight itself, if it is one tensor."""
        first = self.parts[0]
        return first if len(self.parts) == 1 and isinstance(first, torch.Tensor) else None

    def numel(self) -> int:
        """Numbers of the weight, however they are stored."""
        return sum(numbers_of(part).numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(
            part.nbytes if isinstance(part, torch.Tensor) else sum(x.nbytes for x in part)
            for part in self.parts
        )


def numbers_of(part: Stored) -> torch.Tensor:
    """[rows, in], as stored."""
    return part if isinstance(part, torch.Tensor) else part.weight


def rows_of(part: Stored) -> int:
    """How many outputs a part has."""
    return len(numbers_of(part))
