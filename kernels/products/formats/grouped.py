"""The format of 8 bits in groups, and of 4 bits that stand for numbers of a table.

It holds what checkpoints bring and no other format does. On a CPU each product multiplies with a
copy of the weight as floats, made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Self

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight

#: Inputs that share a scale where weights are made of dense ones.
GROUP = 128
#: What the first 8 codes of e2m1 stand for; the others are their negatives.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The code that stands for zero where there are neither zeros nor a table.
MIDDLE = 128


@dataclass(frozen=True, slots=True)
class GroupedWeight(QuantisedWeight):
    """A weight of codes: (code - zero), or the table's number, times scale, by output and group."""

    #: [out, in] uint8; with a table [out, ⌈in / 2⌉], input 2i in the low bits of byte i.
    codes: torch.Tensor
    #: [out, groups] of any float type; or uint8, exponents of two, 127 being 1.
    scale: torch.Tensor
    #: [in] int32: the group of each input.
    index: torch.Tensor
    #: [out, groups] uint8; None: all are 128, or there is a table.
    zero: torch.Tensor | None = None
    #: [16] float32: what codes of 4 bits stand for; None: they have 8 bits.
    table: torch.Tensor | None = None

    @classmethod
    def made_of(cls, weight: torch.Tensor) -> Self:
        """Of a weight [out, in] of any float type, 8 bits in groups of 128, zero in the middle."""
        index = torch.arange(weight.shape[1], device=weight.device) // GROUP
        groups = -(-weight.shape[1] // GROUP)
        most = torch.zeros((len(weight), groups), device=weight.device)
        most.scatter_reduce_(1, index.expand_as(weight), weight.abs().float(), "amax")
        scale = most / (MIDDLE - 1)
        shares = weight / torch.where(scale > 0, scale, 1.0)[:, index]
        codes = (shares.nan_to_num(0.0).round() + MIDDLE).clamp(1, 255).to(torch.uint8)
        return cls(codes, scale, index.to(torch.int32))

    @staticmethod
    def bytes_of(outputs: range, inputs: range) -> int:
        """A byte per number, a scale per group, and an index."""
        groups = (inputs.stop - 1) // GROUP - inputs.start // GROUP + 1
        return len(outputs) * (len(inputs) + 4 * groups) + 4 * len(inputs)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self | None:
        """All rows, if their inputs are in the same groups and their codes stand for the same."""
        first = parts[0]
        same = all(
            torch.equal(part.index, first.index)
            and part.scale.dtype == first.scale.dtype
            and (part.zero is None) == (first.zero is None)
            and _same(part.table, first.table)
            for part in parts
        )
        if not same:
            return None
        zeros = [part.zero for part in parts if part.zero is not None]
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat(zeros) if zeros else None,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.codes), len(self.index)

    def outputs(self, rows: torch.Tensor | slice) -> Self:
        """Rows, by their numbers [n] int64 or as a slice."""
        return replace(
            self,
            codes=self.codes[rows].contiguous(),
            scale=self.scale[rows].contiguous(),
            zero=None if self.zero is None else self.zero[rows].contiguous(),
        )

    @property
    def is_mxfp4(self) -> bool:
        """Whether codes are e2m1 and scales exponents of two."""
        if self.table is None or self.scale.dtype != torch.uint8:
            return False
        positive = torch.tensor(E2M1, device=self.table.device)
        return torch.equal(self.table, torch.cat((positive, -positive)))

    @property
    def group(self) -> int | None:
        """Inputs of a group, the last of which may have fewer; None: groups are not regular."""
        first = int((self.index == self.index[:1]).sum()) if len(self.index) else 1
        regular = torch.arange(len(self.index), device=self.index.device) // first
        return first if torch.equal(self.index.long(), regular) else None

    def inputs(self, part: range) -> Self:
        """Columns, with the scales of the groups that they are in.

        A regular group that is cut makes all groups as short as its parts.
        """
        group = self.group
        if group is not None and part.start % group:
            return self._narrowed(group, gcd(group, part.start)).inputs(part)
        kept, index = torch.unique(self.index[part.start : part.stop], return_inverse=True)
        codes = self.unpacked[:, part.start : part.stop]
        return replace(
            self,
            codes=codes.contiguous() if self.table is None else packed_pairs(codes),
            scale=self.scale[:, kept],
            index=index.to(torch.int32),
            zero=None if self.zero is None else self.zero[:, kept],
        )

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[out, in] as `dtype`."""
        index, codes = self.index.long(), self.unpacked
        scale = floats_of(self.scale)[:, index]
        if self.table is not None:
            return (self.table[codes.int()] * scale).to(dtype)
        zero = MIDDLE if self.zero is None else self.zero.float()[:, index]
        return ((codes.float() - zero) * scale).to(dtype)

    def _narrowed(self, group: int, to: int) -> Self:
        """The same in groups of `to` inputs instead of `group`."""
        index = torch.arange(len(self.index), device=self.index.device, dtype=torch.int32) // to
        groups = -(-len(self.index) // to)

        def repeated(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(group // to, 1)[:, :groups]

        zero = None if self.zero is None else repeated(self.zero)
        return replace(self, scale=repeated(self.scale), index=index, zero=zero)

    @property
    def unpacked(self) -> torch.Tensor:
        """Codes [out, in] uint8."""
        if self.table is None:
            return self.codes
        pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=2)
        return pairs.flatten(1)[:, : len(self.index)]


def floats_of(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32, also of those that are exponents."""
    if scale.dtype != torch.uint8:
        return scale.float()
    return torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)


def packed_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] within 0 to 15 -> [out, ⌈in / 2⌉] uint8, input 2i in the low bits."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
