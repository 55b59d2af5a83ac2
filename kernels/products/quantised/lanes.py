"""Weights as `lane_products` reads them: repacked once, as a model is made.

A lane is 16 bits. It holds 4 codes of 4 bits or 2 of 8, each of another plane: of each block of
inputs, the first `width` are plane 0, the next ones plane 1, and so on. So a lane at a place
becomes, plane by plane, a bfloat16 at the same place: two of them fill a register of 32 bits before
and after, and tiles of lanes go to the matrix unit without any exchange between threads. A block's
planes beside each other are its inputs, as they come.

Scales and zeros are words of 32 bits, two bfloat16 each, so that they are copied ahead as numbers
are; and turned around, [words, rows]: a step of a program reads a block's of all its rows. Scales
that bfloat16 does not hold can be kept as float32, `apart` from numbers: they multiply sums.
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
from tokenpod.kernels.products.formats.int8 import Int8Weight

#: Inputs of a block, at most.
MOST_BLOCK = 128
#: Lanes of a plane, at least: what the matrix unit multiplies at a time.
LEAST_WIDTH = 16
#: Lanes of a plane where no scale is a block's: so that blocks can be short steps.
ROW_WIDTH = 32
#: Scales of "int4" are less: numbers are multiplied by them and a power of two in one step.
MOST_SCALE = 32.0
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
    #: [blocks · words, rows] int32. With zeros each scale has a word: what is added to the whole
    #: numbers of its planes in the low half, the scale in the high one. Without, one scale of a
    #: block is a word's high half, two are both halves, and four are two words. Scales that are
    #: `apart` have a word each as float32; below all of them are as many of what is added.
    scale: torch.Tensor
    zeros: bool
    #: What the 16 codes of "table4" stand for as bfloat16, as 8 words: 16 low bytes, then 16 high.
    table: tuple[int, ...] | None
    inputs: int
    #: Lanes of a plane.
    width: int
    #: Of a block: 1, 2 or 4, each of planes that are neighbours. 0: a row has one, and `scale` is
    #: [1, rows], float32 as whole numbers.
    scales: int
    #: [inputs] int64, which input each one is; None: as they come.
    order: torch.Tensor | None = None
    apart: bool = False

    @property
    def planes(self) -> int:
        """Codes of a lane."""
        return 2 if self.kind == "int8" else 4

    @property
    def blocks(self) -> int:
        """Of a row; the last one may be filled up."""
        return self.numbers.shape[1] // self.width

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.numbers), self.inputs

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        tensors = (self.numbers, self.scale, self.order)
        return sum(x.nbytes for x in tensors if x is not None)

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, inputs] as `dtype`, in the order in which they are stored."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.numbers.device)
        for rows in _portions(*self.shape):
            whole[rows] = self._some(rows).to(dtype)
        return whole

    def _some(self, rows: slice) -> torch.Tensor:
        codes = _unpacked(self.numbers[rows], self.planes, self.width, self.table is not None)
        if self.scales == 0:
            numbers = self._numbers(codes) * self.scale[0, rows].view(torch.float32)[:, None]
            return numbers[:, : self.inputs]
        words = self.scale[:, rows].t().reshape(len(codes), self.blocks, -1)
        low, high = (words << 16).view(torch.float32), (words & -65536).view(torch.float32)
        if self.apart:
            own = self.scale[:, rows].t().contiguous().view(torch.float32)
            own = own.view(len(codes), -1, self.blocks, self.scales)
            scale, plus = own[:, 0], own[:, -1] if self.zeros else torch.zeros_like(own[:, 0])
        elif self.zeros:
            scale, plus = high, low
        elif self.scales == 1:
            scale, plus = high, torch.zeros_like(high)
        else:
            scale = torch.stack((low, high), 3).flatten(2)
            plus = torch.zeros_like(scale)
        each = self.planes // self.scales
        scale, plus = (v.repeat_interleave(each, 2)[..., None] for v in (scale, plus))
        numbers = self._numbers(codes).view(len(codes), self.blocks, self.planes, self.width)
        return ((numbers + plus) * scale).flatten(1)[:, : self.inputs]

    def _numbers(self, codes: torch.Tensor) -> torch.Tensor:
        if self.kind == "int8":
            return codes.float() - 128
        if self.kind == "int4":
            return codes.float() - 8
        table = MXFP4_TABLE if self.table is None else self.table
        low = torch.tensor([word >> 8 * i & 255 for word in table[:4] for i in range(4)])
        high = torch.tensor([word >> 8 * i & 255 for word in table[4:] for i in range(4)])
        values = ((high << 24) | (low << 16)).to(torch.int64)
        values = torch.where(values >= 1 << 31, values - (1 << 32), values).to(torch.int32)
        return values.view(torch.float32).to(codes.device)[codes.long()]


def lanes_of(weight: QuantisedWeight, *, exact: bool = False) -> Lanes | None:
    """A weight in lanes; None where its groups are not regular, or too short.

    `exact`: with scales apart where bfloat16 would round them.
    """
    if isinstance(weight, Int4Weight):
        return _of_int4(weight, exact)
    if isinstance(weight, Int8Weight) and weight.rounding is None:
        return _of_rows(weight)
    return _of_codes(weight, exact) if isinstance(weight, GroupedWeight) else None


def _of_rows(weight: Int8Weight) -> Lanes:
    """Scales of rows multiply sums: no number is rounded."""
    numbers = _packed(weight, 2, ROW_WIDTH, paired=False)
    words = weight.scale.float().contiguous().view(torch.int32)[None]
    return Lanes("int8", numbers, words, False, None, weight.shape[1], ROW_WIDTH, 0)


def _of_int4(weight: Int4Weight, exact: bool) -> Lanes | None:
    width = _width(weight.group, weight.width, 4)
    large = weight.scale.numel() and not float(weight.scale.abs().max()) < MOST_SCALE
    if weight.index is not None or width is None or (large and not exact):
        return None
    plus = None if weight.zero is None else 8 - weight.zero.float()
    scale = weight.scale.float()
    apart = exact and (bool(large) or _is_rounded(scale))
    order = weight.order
    return _made("int4", weight, width, weight.group, scale, plus, order=order, apart=apart)


def _of_codes(weight: GroupedWeight, exact: bool) -> Lanes | None:
    group, inputs = weight.group, weight.shape[1]
    planes = 2 if weight.table is None else 4
    width = None if group is None else _width(group, inputs, planes)
    if group is None or width is None:
        return None
    scale = floats_of(weight.scale)
    apart = exact and _is_rounded(scale)
    if weight.table is None:
        plus = None if weight.zero is None else 128 - weight.zero.float()
        return _made("int8", weight, width, group, scale, plus, apart=apart)
    if weight.is_mxfp4:
        return _made("mxfp4", weight, width, group, scale, None)
    table = _bytes(weight.table)
    return _made("table4", weight, width, group, scale, None, table=table, apart=apart)


def _is_rounded(scale: torch.Tensor) -> bool:
    return not torch.equal(scale.to(torch.bfloat16).float(), scale)


def _made(
    kind: str,
    weight: Int4Weight | GroupedWeight,
    width: int,
    group: int,
    scale: torch.Tensor,
    plus: torch.Tensor | None,
    table: tuple[int, ...] | None = None,
    order: torch.Tensor | None = None,
    apart: bool = False,
) -> Lanes:
    planes = 2 if kind == "int8" else 4
    numbers = _packed(weight, planes, width, paired=kind == "table4")
    per_group = max(group // width, 1)
    scales = next(n for n in (1, 2, 4) if n == planes or per_group % (planes // n) == 0)
    of_words = _words_apart if apart else _words
    words = of_words(scale, plus, numbers.shape[1] // width, scales, planes, per_group)
    inputs, zeros = weight.shape[1], plus is not None
    return Lanes(kind, numbers, words, zeros, table, inputs, width, scales, order, apart)


def _width(group: int, inputs: int, planes: int) -> int | None:
    """Lanes of a plane, which has one scale; None: too few."""
    most = MOST_BLOCK // planes
    width = most if group >= inputs else gcd(group, most)
    return width if width >= LEAST_WIDTH else None


def _words_apart(
    scale: torch.Tensor,
    plus: torch.Tensor | None,
    blocks: int,
    scales: int,
    planes: int,
    per_group: int,
) -> torch.Tensor:
    """Values [rows, groups] float32 as `Lanes.scale` has those that are apart."""
    group = _groups(scale, blocks, scales, planes, per_group)
    values = [scale] if plus is None else [scale, plus]
    return torch.cat([each[:, group].t() for each in values]).contiguous().view(torch.int32)


def _groups(
    scale: torch.Tensor, blocks: int, scales: int, planes: int, per_group: int
) -> torch.Tensor:
    """The group of each of the blocks' scales."""
    plane = torch.arange(blocks * scales, device=scale.device) * (planes // scales)
    return (plane // per_group).clamp(max=scale.shape[1] - 1)


def _words(
    scale: torch.Tensor,
    plus: torch.Tensor | None,
    blocks: int,
    scales: int,
    planes: int,
    per_group: int,
) -> torch.Tensor:
    """Values [rows, groups] float32 as `Lanes.scale` has them."""
    group = _groups(scale, blocks, scales, planes, per_group)

    def halves(values: torch.Tensor) -> torch.Tensor:
        """[blocks · scales, rows] int32, the bits of a bfloat16."""
        bits = values.to(torch.bfloat16).view(torch.int16)[:, group].t()
        return bits.to(torch.int32) & 0xFFFF

    high = halves(scale)
    if plus is not None:
        return (high << 16 | halves(plus)).contiguous()
    if scales == 1:
        return (high << 16).contiguous()
    return (high[1::2] << 16 | high[0::2]).contiguous()


def _bytes(table: torch.Tensor) -> tuple[int, ...]:
    bits = table.to(torch.bfloat16).view(torch.int16).to(torch.int32)
    halves = torch.cat((bits & 255, bits >> 8 & 255)).to(torch.uint8)
    return tuple(halves.view(torch.int32).tolist())


#: Of e2m1.
MXFP4_TABLE = _bytes(
    torch.tensor([s * v for s in (1.0, -1.0) for v in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
)


def _packed(
    weight: Int4Weight | Int8Weight | GroupedWeight, planes: int, width: int, *, paired: bool
) -> torch.Tensor:
    """Codes as `Lanes.numbers` has them, some rows unpacked at a time."""
    outputs, inputs = weight.shape
    blocks, bits = -(-inputs // (planes * width)), 16 // planes
    device = weight.scale.device
    packed = torch.empty((outputs, blocks * width), dtype=torch.int16, device=device)
    for rows in _portions(outputs, inputs):
        some = weight.outputs(rows)
        if isinstance(some, Int8Weight):
            codes = some.numbers.view(torch.uint8) ^ 128
        else:
            codes = some.numbers if isinstance(some, Int4Weight) else some.unpacked
        codes = functional.pad(codes, (0, planes * width * blocks - inputs)).to(torch.int32)
        codes = codes.view(len(codes), blocks, planes, width)
        if paired:
            shifts = _pair_shifts(planes, width, device)
            words = (codes << shifts).view(len(codes), blocks, planes, width // 2, 2).sum((2, 4))
            lanes = torch.stack((words, words >> 16), 3)
        else:
            shifts = bits * torch.arange(planes, device=device)[:, None]
            lanes = (codes << shifts).sum(2)
        lanes = lanes.flatten(1) & 0xFFFF
        packed[rows] = torch.where(lanes > 32767, lanes - 65536, lanes).to(torch.int16)
    return packed


def _unpacked(numbers: torch.Tensor, planes: int, width: int, paired: bool) -> torch.Tensor:
    """Lanes [rows, blocks · width] -> codes [rows, blocks · planes · width] int32."""
    lanes = (numbers.to(torch.int32) & 0xFFFF).view(len(numbers), -1, 1, width)
    if paired:
        pairs = lanes.view(len(numbers), -1, 1, width // 2, 2)
        words = (pairs[..., 0] | pairs[..., 1] << 16).repeat_interleave(2, 3)
        return (words >> _pair_shifts(planes, width, numbers.device) & 15).flatten(1)
    bits = 16 // planes
    shifts = bits * torch.arange(planes, device=numbers.device)[:, None]
    return (lanes >> shifts & (1 << bits) - 1).flatten(1)


def _pair_shifts(planes: int, width: int, device: torch.device) -> torch.Tensor:
    """[planes, width]: where the codes of a pair of lanes are in its word."""
    odd = torch.arange(width, device=device) % 2
    return 8 * torch.arange(planes, device=device)[:, None] + 4 * odd


def _portions(outputs: int, inputs: int) -> Iterator[slice]:
    rows = max(_AT_ONCE // max(inputs, 1), 1)
    for first in range(0, outputs, rows):
        yield slice(first, min(first + rows, outputs))
