"""Experts' weights as their products take them: numbers as they are, lanes, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch

from tokenpod.kernels.gpu import launch
from tokenpod.kernels.operations.expert_ops import Stack
from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Rounding
from tokenpod.kernels.products.quantised.input_rounding import round_inputs
from tokenpod.kernels.products.quantised.lanes import Lanes, lanes_of

#: The generation from which on kernels read e4m3.
FP8_CAPABILITY = (8, 9)
#: Inputs of a step of bytes, at most and at least; the matrix unit takes no fewer at a time.
MOST_STEP = 256
LEAST_STEP, LEAST_ROUNDED_STEP = 16, 32


@dataclass(frozen=True, slots=True)
class Bytes:
    """A weight [rows, inputs] of a byte for each number, and its scales."""

    #: "int8" or "fp8".
    kind: str
    #: [rows, inputs] int8
    numbers: torch.Tensor
    #: [⌈rows / scale_rows⌉, columns]
    scale: torch.Tensor
    #: Inputs of a step, a power of two, at most: they share scales.
    step: int
    #: Inputs that share a scale; None: a row has one.
    group: int | None
    #: Rows that share scales.
    scale_rows: int
    rounding: Rounding | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and inputs."""
        return len(self.numbers), self.numbers.shape[1]


@dataclass(frozen=True, slots=True)
class KernelStack:
    """Weights of all experts in a format of fewer bits, their rows below each other."""

    rows: Lanes | Bytes
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs of each, inputs."""
        rows, inputs = self.rows.shape
        return self.experts, rows // self.experts, inputs


class Stacks(NamedTuple):
    """Of one mixture."""

    gate_up: torch.Tensor | KernelStack
    down: torch.Tensor | KernelStack

    @property
    def width(self) -> int:
        """Features of an expert."""
        return self.down.shape[2]

    @property
    def form(self) -> str:
        """ "dense", "bytes" or "lanes", by which tiles are chosen: of both."""
        found = {_form(stack) for stack in self}
        return found.pop() if len(found) == 1 else "bytes"


def _form(stack: torch.Tensor | KernelStack) -> str:
    if isinstance(stack, torch.Tensor):
        return "dense"
    return "lanes" if isinstance(stack.rows, Lanes) else "bytes"


def stack_of(
    weights: Stack, dtype: torch.dtype, capability: tuple[int, int] | None
) -> torch.Tensor | KernelStack:
    """Weights [E, out, in] as the product takes them; dense in `dtype` if no kernel has the format.

    `capability` of the GPU; None where kernels are interpreted.
    """
    if isinstance(weights, torch.Tensor):
        return weights
    made = _bytes_of(weights.rows, capability) or lanes_of(weights.rows, exact=True)
    # Lanes have tables in bfloat16, and inputs as they come.
    rounds = isinstance(made, Lanes) and made.table is not None and dtype.itemsize > 2
    if made is None or rounds or (isinstance(made, Lanes) and made.order is not None):
        return weights.dequantised(dtype)
    return KernelStack(made, weights.experts)


def _bytes_of(weight: QuantisedWeight, capability: tuple[int, int] | None) -> Bytes | None:
    """A format of bytes with rows' or blocks' scales; None: another one, or too short blocks.

    Kernels for rounded inputs take longer groups than others. Where ranks cut blocks shorter than
    that, inputs are not rounded: on a rank with dense numbers instead they would not be, either.
    """
    if isinstance(weight, Int8Weight):
        numbers, scale = weight.numbers.contiguous(), weight.scale[:, None]
        return _in_steps("int8", numbers, scale, None, 1, (weight.rounding,))
    if not isinstance(weight, Fp8Weight) or (capability and capability < FP8_CAPABILITY):
        return None
    numbers = weight.numbers.view(torch.int8)
    if weight.by_output:
        return _in_steps("fp8", numbers, weight.scale, None, 1, (weight.rounding,))
    scale = weight.scale.contiguous()
    group = weight.columns if scale.shape[1] > 1 else MOST_STEP
    return _in_steps("fp8", numbers, scale, group, weight.rows, (weight.rounding, None))


def _in_steps(
    kind: str,
    numbers: torch.Tensor,
    scale: torch.Tensor,
    group: int | None,
    scale_rows: int,
    roundings: Sequence[Rounding | None],
) -> Bytes | None:
    """With the first of the roundings for which steps are long enough."""
    for rounding in roundings:
        of_inputs = (rounding and rounding.group) or MOST_STEP
        step = gcd(gcd(group or MOST_STEP, of_inputs), MOST_STEP)
        if step >= (LEAST_STEP if rounding is None else LEAST_ROUNDED_STEP):
            return Bytes(kind, numbers, scale, step, group, scale_rows, rounding)
    return None


@dataclass(frozen=True, slots=True)
class Walk:
    """What `expert_products.product` needs to know of a weight, and of inputs that it may round."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    #: Inputs of a step.
    block_k: int
    #: Blocks of a row of lanes, or scales of a row of bytes; rows that share them.
    columns: int = 1
    scale_rows: int = 1
    #: Scales of a token.
    their_columns: int = 1
    #: "dense", "lanes" or "bytes".
    form: str = "dense"
    kind: str = ""
    #: Of lanes, as `Lanes` has them.
    table: tuple[int, ...] | None = None
    scales: int = 1
    zeros: bool = False
    apart: bool = False
    planes: int = 1
    width: int = 1
    #: Of bytes: whether inputs are, too; steps that share a scale, of a row and of a token.
    rounded: bool = False
    per_group: int = 0
    per_their: int = 0

    @property
    def even(self) -> bool:
        """Whether inputs are whole steps."""
        return self.x.shape[1] % self.block_k == 0

    def step_bytes(self, tokens: int, rows: int) -> int:
        """Of what is copied ahead for a step of so many tokens and rows of the weight."""
        of_rows = rows * self.weight.element_size() // self.planes
        return self.block_k * (tokens * self.x.element_size() + of_rows)


def walk_of(x: torch.Tensor, weight: torch.Tensor | KernelStack, block_k: int) -> Walk:
    """Of a product of x [T, in]; inputs are rounded here if the format says so."""
    if isinstance(weight, torch.Tensor):
        return Walk(x, x, weight, weight, block_k)
    rows = weight.rows
    if isinstance(rows, Bytes):
        return _walk_of_bytes(x, rows, min(block_k, rows.step))
    block = rows.planes * rows.width
    return Walk(
        *(x, x, rows.numbers, rows.scale),
        block_k=block if rows.apart else max(block_k // block, 1) * block,
        columns=rows.blocks,
        form="lanes",
        kind=rows.kind,
        table=rows.table,
        scales=rows.scales,
        zeros=rows.zeros,
        apart=rows.apart,
        planes=rows.planes,
        width=rows.width,
    )


def _walk_of_bytes(x: torch.Tensor, rows: Bytes, step: int) -> Walk:
    numbers, x_scale, their_columns, per_their = rows.numbers, x, 1, 0
    if rows.rounding is not None:
        x, x_scale = round_inputs(x, rows.rounding)
        their_columns = len(x_scale)
        per_their = (rows.rounding.group or 0) // step
    if launch.capability(x.device) is None:
        x = x.view(torch.int8) if rows.rounding is not None else x
    elif rows.kind == "fp8":
        numbers = numbers.view(torch.float8_e4m3fn)
    return Walk(
        *(x, x_scale, numbers, rows.scale, step),
        columns=rows.scale.shape[1],
        scale_rows=rows.scale_rows,
        their_columns=their_columns,
        form="bytes",
        kind=rows.kind,
        rounded=rows.rounding is not None,
        per_group=(rows.group or 0) // step,
        per_their=per_their,
    )
