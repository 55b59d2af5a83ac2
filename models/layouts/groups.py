"""Whole numbers in groups, however a checkpoint packs them: cut for a rank, in a format of ours."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.kernels.products.formats.int4 import Int4Weight, block_of
from tokenpod.kernels.products.formats.int8 import Int8Weight

#: What stands for zero in numbers of 8 bits that have no zeros of their own.
MIDDLE = 128


@dataclass(frozen=True, slots=True)
class Grouping:
    """How the inputs of a module share scales."""

    #: Of each number: 2, 3, 4 or 8.
    bits: int
    #: Inputs of a group; the last may have fewer. None: all inputs are one group.
    size: int | None

    def length(self, inputs: int) -> int:
        """Inputs of a group of a module with so many."""
        return min(self.size or inputs, inputs)

    def count(self, inputs: int) -> int:
        """Groups of so many inputs."""
        return -(-inputs // self.length(inputs))

    def touched(self, part: range, inputs: int) -> tuple[range, range]:
        """The groups that a part of the inputs is in, and all inputs of these."""
        length = self.length(inputs)
        groups = range(part.start // length, -(-part.stop // length))
        return groups, range(groups.start * length, min(groups.stop * length, inputs))

    @property
    def middle(self) -> int:
        """What stands for zero where numbers have no zeros of their own."""
        return 1 << (self.bits - 1)

    @property
    def format(self) -> str:
        """In words."""
        return f"int{self.bits}"

    def bytes_of(
        self,
        outputs: range,
        inputs: range,
        whole: int,
        scale_bytes: int,
        *,
        zeros: bool,
        ordered: bool = False,
    ) -> int:
        """What a part of a module with `whole` inputs takes; `ordered` ones are in any group."""
        per_group = scale_bytes + zeros
        if self.bits == 8:
            if self.size is None and not zeros:
                return Int8Weight.bytes_of(outputs, inputs)
            length = gcd(self.length(whole), inputs.start)
            groups = self.count(whole) if ordered else -(-len(inputs) // length)
            return len(outputs) * (len(inputs) + per_group * groups) + 4 * len(inputs)
        # As Int4Weight cuts a group at the first input: none is longer than what divides both.
        length = self.length(whole)
        length = length if ordered else gcd(length, inputs.start)
        groups = self.count(whole) if ordered else -(-len(inputs) // length)
        block = block_of(length)
        numbers = -(-len(inputs) // block) * block // 2
        index = 12 * len(inputs) if ordered else 0
        return len(outputs) * (numbers + per_group * groups) + index

    def held(
        self,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        index: torch.Tensor | None = None,
    ) -> QuantisedWeight:
        """A weight of numbers [out, in] uint8 from 0 on, scale and zero [out, groups].

        Args:
            numbers: as stored.
            scale: of any float type.
            zero: uint8; None: all are in the middle.
            index: [in], the group of each input; None: groups follow each other.
        """
        if self.bits < 8:
            # Fewer bits are numbers of 4 with zeros of their own.
            if zero is None and self.bits < 4:
                zero = torch.full_like(scale, self.middle, dtype=torch.uint8)
            length = self.length(numbers.shape[1]) if index is None else self.size
            return Int4Weight.of(
                numbers, scale.contiguous(), zero, length or numbers.shape[1], index
            )
        if scale.shape[1] == 1 and zero is None:
            signed = (numbers.to(torch.int16) - MIDDLE).to(torch.int8)
            return Int8Weight(signed, scale[:, 0].float().contiguous())
        if index is None:
            index = torch.arange(numbers.shape[1], device=numbers.device)
            index = index // self.length(numbers.shape[1])
        return GroupedWeight(numbers.contiguous(), scale.contiguous(), index.to(torch.int32), zero)
