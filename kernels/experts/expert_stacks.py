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


class WalkArguments(NamedTuple):
    """What `expert_products.product` needs to know of a weight, and of inputs that it may round."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    #: Blocks of a row of lanes, or scales of a row of bytes.
    columns: int
    scale_rows: int
    their_columns: int
    constants: dict[str, object]


def walk_arguments(
    x: torch.Tensor, weight: torch.Tensor | KernelStack, block_k: int
) -> WalkArguments:
    """Of a product of x [T, in]; inputs are rounded here if the format says so."""
    constants: dict[str, object] = {
        **{"FORM": "dense", "KIND": "", "ROUNDED": False, "PER_GROUP": 0, "PER_THEIR": 0},
        **{
            "TABLE": None,
            "SCALES": 1,
            "ZEROS": False,
            "SCALES_APART": False,
            "PLANES": 1,
            "WIDTH": 1,
        },
        **{"BLOCK_K": block_k, "EVEN": x.shape[1] % block_k == 0},
    }
    if isinstance(weight, torch.Tensor):
        return WalkArguments(x, x, weight, weight, 1, 1, 1, constants)
    rows, inputs = weight.rows, x.shape[1]
    if isinstance(rows, Lanes):
        block = rows.planes * rows.width
        blocks = 1 if rows.apart else max(block_k // block, 1)
        constants |= {"FORM": "lanes", "KIND": rows.kind, "TABLE": rows.table}
        constants |= {"SCALES": rows.scales, "ZEROS": rows.zeros, "SCALES_APART": rows.apart}
        constants |= {"PLANES": rows.planes, "WIDTH": rows.width, "BLOCK_K": blocks * block}
        constants["EVEN"] = inputs % (blocks * block) == 0
        return WalkArguments(x, x, rows.numbers, rows.scale, rows.blocks, 1, 1, constants)
    step = min(block_k, rows.step)
    constants |= {"FORM": "bytes", "KIND": rows.kind, "BLOCK_K": step, "EVEN": inputs % step == 0}
    constants["PER_GROUP"] = 0 if rows.group is None else rows.group // step
    numbers, x_scale, their_columns = rows.numbers, x, 1
    if rows.rounding is not None:
        x, x_scale = round_inputs(x, rows.rounding)
        their_columns = x_scale.shape[1]
        group = rows.rounding.group
        constants |= {"ROUNDED": True, "PER_THEIR": 0 if group is None else group // step}
    if launch.capability(x.device) is None:
        x = x.view(torch.int8) if rows.rounding is not None else x
    elif rows.kind == "fp8":
        numbers = numbers.view(torch.float8_e4m3fn)
    return WalkArguments(
        x, x_scale, numbers, rows.scale, rows.scale.shape[1], rows.scale_rows, their_columns,
        constants,
    )  # fmt: skip
