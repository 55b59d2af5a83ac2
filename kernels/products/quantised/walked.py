"""Weights of any format as `stored.walk_stored` takes them: repacked once, as a model is made."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch.nn import functional

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, floats_of
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Rounding

#: Inputs of a run of bytes, at most and at least; the matrix unit takes no fewer at a time.
MOST_WIDTH = 256
LEAST_WIDTH, LEAST_ROUNDED_WIDTH = 16, 32
#: The same of the runs that two planes of 4 bits are.
MOST_PLANE = 64
#: Numbers that are repacked at a time.
_AT_ONCE = 1 << 26


@dataclass(frozen=True, slots=True)
class Walked:
    """A weight [rows, inputs] in bytes, and the scales of its groups."""

    #: "int8", "fp8", "int4", "mxfp4" or "table4".
    kind: str
    #: [rows, bytes] int8. Of 4 bits byte b of each `width` has number b of a run of `width` inputs
    #: in its low half, and number b of the next run in its high half.
    numbers: torch.Tensor
    #: [⌈rows / scale_rows⌉, columns]
    scale: torch.Tensor
    #: The same of whole numbers, less 8 where they have 4 bits; None: in the middle.
    zero: torch.Tensor | None
    #: [16] float32: what codes of "table4" stand for.
    table: torch.Tensor | None
    inputs: int
    #: Inputs of a run, a power of two: at most, or of 4 bits always.
    width: int
    #: Inputs that share a scale; None: a row has one scale.
    group: int | None = None
    #: Rows that share scales.
    scale_rows: int = 1
    rounding: Rounding | None = None

    @property
    def planes(self) -> int:
        """Numbers in a byte."""
        return 1 if self.kind in ("int8", "fp8") else 2

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        tensors = (self.numbers, self.scale, self.zero, self.table)
        return sum(x.nbytes for x in tensors if x is not None)


def walked(weight: QuantisedWeight) -> Walked | None:
    """A weight in bytes; None where its groups are not regular, or too short for the kernels.

    Kernels for rounded inputs take longer groups than others. Where ranks cut blocks shorter than
    that, inputs are not rounded: on a rank with dense numbers instead they would not be, either.
    """
    if isinstance(weight, Int8Weight):
        numbers, scale = weight.numbers.contiguous(), weight.scale[:, None]
        return _bytes("int8", numbers, scale, None, rounding=weight.rounding)
    if isinstance(weight, Fp8Weight):
        numbers = weight.numbers.view(torch.int8)
        if weight.by_output:
            return _bytes("fp8", numbers, weight.scale, None, rounding=weight.rounding)
        scale = weight.scale.contiguous()
        group = weight.columns if scale.shape[1] > 1 else MOST_WIDTH
        each = (
            _bytes("fp8", numbers, scale, group, scale_rows=weight.rows, rounding=rounding)
            for rounding in (weight.rounding, None)
        )
        return next(filter(None, each), None)
    if isinstance(weight, Int4Weight):
        return _of_int4(weight)
    return _of_codes(weight) if isinstance(weight, GroupedWeight) else None


def _bytes(
    kind: str,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    group: int | None,
    *,
    zero: torch.Tensor | None = None,
    scale_rows: int = 1,
    rounding: Rounding | None = None,
) -> Walked | None:
    of_inputs = rounding.group if rounding is not None and rounding.group else MOST_WIDTH
    common = gcd(gcd(group or MOST_WIDTH, of_inputs), MOST_WIDTH)
    if common < (LEAST_WIDTH if rounding is None else LEAST_ROUNDED_WIDTH):
        return None
    inputs = numbers.shape[1]
    return Walked(kind, numbers, scale, zero, None, inputs, common, group, scale_rows, rounding)


def _of_int4(weight: Int4Weight) -> Walked | None:
    if weight.index is not None or weight.order is not None:
        return None
    width = _plane(weight.group, weight.width)
    if width is None:
        return None
    numbers = _halves(weight, width)
    zero = None if weight.zero is None else (weight.zero.to(torch.int16) - 8).to(torch.int8)
    group = max(weight.group, width)
    return Walked("int4", numbers, weight.scale, zero, None, weight.width, width, group)


def _of_codes(weight: GroupedWeight) -> Walked | None:
    group, inputs = weight.group, weight.shape[1]
    if group is None:
        return None
    scale = weight.scale.contiguous()
    if weight.table is None:
        # The highest bit turned is half the range less.
        numbers = (weight.codes ^ 128).view(torch.int8)
        zero = None if weight.zero is None else (weight.zero ^ 128).view(torch.int8).contiguous()
        group = MOST_WIDTH if scale.shape[1] == 1 else group
        return _bytes("int8", numbers, floats_of(scale), group, zero=zero)
    width = _plane(group, inputs)
    if width is None:
        return None
    numbers = _halves(weight, width)
    if weight.is_mxfp4:
        return Walked("mxfp4", numbers, scale, None, None, inputs, width, max(group, width))
    table = weight.table.float().contiguous()
    return Walked(
        "table4", numbers, floats_of(scale), None, table, inputs, width, max(group, width)
    )


def _plane(group: int, inputs: int) -> int | None:
    """Inputs of a run that share a scale; None: too few."""
    width = MOST_PLANE if group >= inputs else gcd(group, MOST_PLANE)
    return width if width >= LEAST_WIDTH else None


def _halves(weight: Int4Weight | GroupedWeight, width: int) -> torch.Tensor:
    """Codes as `Walked.numbers` has them, some rows unpacked at a time."""
    outputs, inputs = weight.shape
    blocks = -(-inputs // (2 * width))
    device = weight.scale.device
    packed = torch.empty((outputs, blocks * width), dtype=torch.uint8, device=device)
    rows = max(_AT_ONCE // max(inputs, 1), 1)
    for first in range(0, outputs, rows):
        some = weight.outputs(slice(first, min(first + rows, outputs)))
        codes = some.numbers if isinstance(some, Int4Weight) else some.unpacked
        codes = functional.pad(codes, (0, 2 * width * blocks - inputs))
        codes = codes.view(len(codes), blocks, 2, width)
        packed[first : first + rows] = (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)
    return packed.view(torch.int8)
