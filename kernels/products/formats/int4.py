"""The format of 4 bits: a scale, and if need be a zero, per output and group of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch
from torch.nn import functional

from tokenpod.kernels.operations.weight import QuantisedWeight

#: Inputs that share a scale where weights are made while loading.
GROUP = 128
#: The number that stands for zero where a weight has no zeros of its own.
MIDDLE = 8
#: The largest number.
MOST = 15
#: The largest and the smallest number of inputs in a block; see `block_of`.
MOST_IN_BLOCK = 128
LEAST_IN_BLOCK = 32
#: Numbers of a word of 32 bits.
IN_WORD = 8


def block_of(group: int) -> int:
    """Inputs that are stored together: as many as all share a scale, at most 128.

    A block's words are an eighth of its inputs. Word i holds input i of each of the 8 runs of as
    many inputs, the first run in its lowest bits: so neighbouring threads that have neighbouring
    words have neighbouring inputs too, at each of 8 shifts. Where few share a scale, or their
    number divides no 128, a block is 128 inputs, which then have several scales.
    """
    common = gcd(group, MOST_IN_BLOCK)
    return common if common >= LEAST_IN_BLOCK else MOST_IN_BLOCK


@dataclass(frozen=True, slots=True)
class Int4Weight(QuantisedWeight):
    """A weight of 4 bits: (number - zero) times scale, both of the number's output and group."""

    #: [out, ⌈in / block⌉ · block / 8] int32; see `block_of`. Inputs beyond the last are 0.
    packed: torch.Tensor
    #: [out, groups] of any float type.
    scale: torch.Tensor
    #: [out, groups] uint8; None: all are 8.
    zero: torch.Tensor | None
    #: Inputs.
    width: int
    #: Inputs of a group; the last may have fewer.
    group: int
    #: [in] int32: the group of each stored input, where groups are not as long as each other.
    index: torch.Tensor | None = None
    #: [in] int64: which input each stored one is; None: stored as they come.
    order: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        numbers: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group: int,
        index: torch.Tensor | None = None,
    ) -> Self:
        """Of numbers [out, in] within 0 to 15, scale and zero [out, groups].

        Groups have `group` inputs each; or `index` [in] says which group each input is in. Inputs
        are then stored group by group, and products take theirs in that order.
        """
        width = numbers.shape[1]
        order = None
        if index is not None:
            order = index.argsort(stable=True)
            index = index[order].to(torch.int32)
            numbers = numbers[:, order]
            if torch.equal(order, torch.arange(width, device=order.device)):
                order = None
            regular = torch.arange(width, device=index.device, dtype=torch.int32) // group
            if torch.equal(index, regular):
                index = None
        return cls(packed_of(numbers, group), scale, zero, width, group, index, order)

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """Of a weight [out, in] of any float type, in groups of 128, zero in the middle.

        The largest number of a group becomes 7.5 times its scale: half a scale off, as any other
        may be. A group that holds a number that is none gets a scale that is none.
        """
        outputs, inputs = weight.shape
        groups = -(-inputs // GROUP)
        spare = groups * GROUP - inputs
        wide = functional.pad(weight.float(), (0, spare)) if spare else weight.float()
        wide = wide.reshape(outputs, groups, GROUP)
        most = torch.maximum(wide.amax(2), -wide.amin(2))
        scale = (most / (MIDDLE - 0.5)).to(torch.bfloat16)
        shares = wide / torch.where(scale > 0, scale, 1.0)[:, :, None]
        # In place: a load takes little more memory than the model.
        numbers = shares.nan_to_num_(0.0).round_().add_(MIDDLE).clamp_(0, MOST).to(torch.uint8)
        return cls.of(numbers.view(outputs, -1)[:, :inputs], scale, None, GROUP)

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """Half a byte per number, in whole blocks, and a scale of 2 bytes per group."""
        group = gcd(GROUP, inputs.start)
        block = block_of(group)
        words = -(-len(inputs) // block) * block // IN_WORD
        return len(outputs) * (4 * words + 2 * -(-len(inputs) // group))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """All rows, if their inputs are in the same groups and order."""
        first = parts[0]
        if any(
            (part.width, part.group, part.scale.dtype)
            != (first.width, first.group, first.scale.dtype)
            or not _same(part.index, first.index)
            or not _same(part.order, first.order)
            for part in parts
        ):
            return None
        zero = None
        if any(part.zero is not None for part in parts):
            zero = torch.cat([part.zeros for part in parts])
        return replace(
            first,
            packed=torch.cat([part.packed for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=zero,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.packed), self.width

    @property
    def zeros(self) -> torch.Tensor:
        """[out, groups] uint8, also where all are 8."""
        if self.zero is not None:
            return self.zero
        return torch.full(self.scale.shape, MIDDLE, dtype=torch.uint8, device=self.scale.device)

    @property
    def numbers(self) -> torch.Tensor:
        """[out, in] uint8 within 0 to 15, as stored."""
        run = block_of(self.group) // IN_WORD
        words = self.packed.view(len(self.packed), -1, run)
        shape = (*words.shape[:2], IN_WORD, run)
        numbers = torch.empty(shape, dtype=torch.uint8, device=words.device)
        for place in range(IN_WORD):  # at once they would take 4 bytes each
            numbers[:, :, place] = words >> 4 * place & MOST
        return numbers.flatten(1)[:, : self.width]

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """Rows, by their numbers [n] int64 or as a slice."""
        return replace(
            self,
            packed=self.packed[rows].contiguous(),
            scale=self.scale[rows].contiguous(),
            zero=None if self.zero is None else self.zero[rows].contiguous(),
        )

    def inputs(self, part: range) -> Self:
        """Columns. A group that is cut makes all groups as short as its parts.

        Where inputs are stored in another order, all groups' scales stay, and an index of groups.
        """
        if self.order is not None or self.index is not None:
            numbers, index = self._as_they_come()
            kept = slice(part.start, part.stop)
            return self.of(numbers[:, kept], self.scale, self.zero, self.group, index[kept])
        group = gcd(self.group, part.start)
        kept = slice(part.start // group, -(-part.stop // group))

        def narrowed(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(self.group // group, 1)[:, kept].contiguous()

        return type(self)(
            packed_of(self.numbers[:, part.start : part.stop], group),
            narrowed(self.scale),
            None if self.zero is None else narrowed(self.zero),
            len(part),
            group,
        )

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`, inputs as they come."""
        numbers, index = self._as_they_come()
        scale = self.scale.float()[:, index]
        if self.zero is None:
            return ((numbers.float() - MIDDLE) * scale).to(dtype)
        return ((numbers.float() - self.zero.float()[:, index]) * scale).to(dtype)

    def _as_they_come(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [out, in] and the group of each input [in] int64."""
        index = self.index
        if index is None:
            index = torch.arange(self.width, device=self.packed.device) // self.group
        if self.order is None:
            return self.numbers, index.long()
        back = self.order.argsort()
        return self.numbers[:, back], index.long()[back]


def packed_of(numbers: torch.Tensor, group: int) -> torch.Tensor:
    """Numbers [out, in] within 0 to 15 -> words as `Int4Weight.packed` has them."""
    outputs, inputs = numbers.shape
    block = block_of(group)
    blocks, run = -(-inputs // block), block // IN_WORD
    wide = functional.pad(numbers.to(torch.uint8), (0, blocks * block - inputs))
    runs = wide.view(outputs, blocks, IN_WORD, run)
    packed = torch.zeros((outputs, blocks, run), dtype=torch.int32, device=numbers.device)
    for place in range(IN_WORD):
        packed |= runs[:, :, place].to(torch.int32) << 4 * place
    return packed.view(outputs, blocks * run)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
