"""Weights as `lane_products` reads them: repacked once, as a model is made.

A lane is 16 bits. It holds 4 codes of 4 bits or 2 of 8, each of another plane: of each block of
inputs, the first `width` are plane 0, the next ones plane 1, and so on. So a lane at a place
becomes, plane by plane, a bfloat16 at the same place: two of them fill a register of 32 bits before
and after, and tiles of lanes go to the matrix unit without any exchange between threads.

Scales are turned around, [groups, rows]: a step of a program reads one group's of all its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import torch
from torch.nn import functional

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, floats_of
from tokenpod.kernels.products.formats.int4 import Int4Weight

#: Lanes of a plane, at most; and at least, which is what the matrix unit multiplies at a time.
MOST_WIDTH, LEAST_WIDTH = 64, 16
#: Codes that are repacked at a time.
_AT_ONCE = 1 << 26


@dataclass(frozen=True, slots=True)
class Lanes:
    """A weight [rows, inputs] of 4 or 8 bits in groups of inputs."""

    #: "int4", "int8", "mxfp4" or "table4".
    kind: str
    #: [rows, blocks · width] int16. Of "table4" the codes of planes p of two neighbouring lanes
    #: are neighbours too: nibbles 2p and 2p + 1 of 32 bits.
    numbers: torch.Tensor
    #: [groups, rows] of any float type; or uint8, exponents of two, 127 being 1.
    scale: torch.Tensor
    #: [blocks · words, rows] int32, two bfloat16 each, low half first: what is added to whole
    #: numbers of planes 0 and 2 where those of a pair share it (one word), else of planes 0 and 1,
    #: and 2 and 3. None: nothing.
    zero: torch.Tensor | None
    #: What the 16 codes of "table4" stand for as bfloat16, as 8 words: 16 low bytes, then 16 high.
    table: tuple[int, ...] | None
    inputs: int
    #: Lanes of a plane.
    width: int
    #: Inputs that share a scale, a multiple of `width`.
    group: int
    #: [inputs] int64, which input each one is; None: as they come.
    order: torch.Tensor | None = None

    @property
    def planes(self) -> int:
        """Codes of a lane."""
        return 2 if self.kind == "int8" else 4

    @property
    def rows(self) -> int:
        """Outputs."""
        return len(self.numbers)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.rows, self.inputs

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        tensors = (self.numbers, self.scale, self.zero, self.order)
        return sum(x.nbytes for x in tensors if x is not None)


def lanes_of(weight: QuantisedWeight) -> Lanes | None:
    """A weight in lanes; None where its groups are not regular, or too short."""
    if isinstance(weight, Int4Weight):
        return _of_int4(weight)
    return _of_codes(weight) if isinstance(weight, GroupedWeight) else None


def _of_int4(weight: Int4Weight) -> Lanes | None:
    width = _width(weight.group, weight.width)
    if weight.index is not None or width is None:
        return None
    scale, group = _turned(weight.scale), max(weight.group, width)
    numbers = _packed(weight, 4, width, paired=False)
    zero = None
    if weight.zero is not None:
        zero = _words(8 - weight.zero.float(), numbers.shape[1] // width, 4, group // width)
    return Lanes("int4", numbers, scale, zero, None, weight.width, width, group, weight.order)


def _of_codes(weight: GroupedWeight) -> Lanes | None:
    group, inputs = weight.group, weight.shape[1]
    width = None if group is None else _width(group, inputs)
    if group is None or width is None:
        return None
    group = max(group, width)
    if weight.table is None:
        numbers = _packed(weight, 2, width, paired=False)
        zero = None
        if weight.zero is not None:
            zero = _words(128 - weight.zero.float(), numbers.shape[1] // width, 2, group // width)
        return Lanes("int8", numbers, _turned(weight.scale), zero, None, inputs, width, group)
    if weight.is_mxfp4:
        numbers = _packed(weight, 4, width, paired=False)
        return Lanes("mxfp4", numbers, _turned(weight.scale), None, None, inputs, width, group)
    numbers = _packed(weight, 4, width, paired=True)
    scale = _turned(floats_of(weight.scale))
    return Lanes("table4", numbers, scale, None, _bytes(weight.table), inputs, width, group)


def _width(group: int, inputs: int) -> int | None:
    """Lanes of a plane, which has one scale; None: too few."""
    width = MOST_WIDTH if group >= inputs else gcd(group, MOST_WIDTH)
    return width if width >= LEAST_WIDTH else None


def _turned(values: torch.Tensor) -> torch.Tensor:
    return values.t().contiguous()


def _words(values: torch.Tensor, blocks: int, planes: int, per_group: int) -> torch.Tensor:
    """Whole numbers [rows, groups], exact as bfloat16, as `Lanes.zero` has them."""
    first = torch.arange(blocks, device=values.device)[:, None] * planes
    pairs = torch.tensor(
        [[0, planes // 2]] if per_group % 2 == 0 else [[0, 1], [2, 3]][: planes // 2]
    )
    plane = first[:, :, None] + pairs.to(values.device)
    group = (plane // per_group).clamp(max=values.shape[1] - 1)
    halves = values.to(torch.bfloat16).view(torch.int16)[:, group.flatten()].t().contiguous()
    halves = halves.view(-1, 2, len(values)).transpose(1, 2).contiguous()
    return halves.view(torch.int32).squeeze(2)


def _bytes(table: torch.Tensor) -> tuple[int, ...]:
    bits = table.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    halves = torch.cat((bits & 255, bits >> 8 & 255)).to(torch.uint8)
    return tuple(halves.view(torch.int32).tolist())


def _packed(
    weight: Int4Weight | GroupedWeight, planes: int, width: int, *, paired: bool
) -> torch.Tensor:
    """Codes as `Lanes.numbers` has them, some rows unpacked at a time."""
    outputs, inputs = weight.shape
    blocks, bits = -(-inputs // (planes * width)), 16 // planes
    device = weight.scale.device
    packed = torch.empty((outputs, blocks * width), dtype=torch.int16, device=device)
    for rows in _portions(outputs, inputs):
        some = weight.outputs(rows)
        codes = some.numbers if isinstance(some, Int4Weight) else some.unpacked
        if planes == 2:
            codes = codes ^ 128
        codes = functional.pad(codes, (0, planes * width * blocks - inputs)).to(torch.int32)
        codes = codes.view(len(codes), blocks, planes, width)
        if paired:
            shifts = 8 * torch.arange(planes, device=device)[:, None] + 4 * (
                torch.arange(width, device=device) % 2
            )
            words = (codes << shifts).view(len(codes), blocks, planes, width // 2, 2).sum((2, 4))
            lanes = torch.stack((words, words >> 16), 3)
        else:
            shifts = bits * torch.arange(planes, device=device)[:, None]
            lanes = (codes << shifts).sum(2)
        lanes = lanes.flatten(1) & 0xFFFF
        packed[rows] = torch.where(lanes > 32767, lanes - 65536, lanes).to(torch.int16)
    return packed


def _portions(outputs: int, inputs: int) -> Iterator[slice]:
    rows = max(_AT_ONCE // max(inputs, 1), 1)
    for first in range(0, outputs, rows):
        yield slice(first, min(first + rows, outputs))
