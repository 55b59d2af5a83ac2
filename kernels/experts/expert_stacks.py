"""Experts' weights as their products take them: numbers as they are, or bytes in any format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenpod.kernels.gpu import launch
from tokenpod.kernels.operations.expert_ops import Stack
from tokenpod.kernels.products.quantised.input_rounding import round_inputs
from tokenpod.kernels.products.quantised.walked import Walked, walked

#: The generation from which on kernels read e4m3.
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class WalkedStack:
    """Weights of all experts, below each other, as `stored.walk_stored` takes them."""

    rows: Walked
    experts: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs of each, inputs."""
        return self.experts, len(self.rows.numbers) // self.experts, self.rows.inputs


class Stacks(NamedTuple):
    """Of one mixture."""

    gate_up: torch.Tensor | WalkedStack
    down: torch.Tensor | WalkedStack

    @property
    def width(self) -> int:
        """Features of an expert."""
        return self.down.shape[2]


def stack_of(
    weights: Stack, dtype: torch.dtype, capability: tuple[int, int] | None
) -> torch.Tensor | WalkedStack:
    """Weights [E, out, in] as the product takes them; dense in `dtype` if no kernel has the format.

    `capability` of the GPU; None where kernels are interpreted.
    """
    if isinstance(weights, torch.Tensor):
        return weights
    made = walked(weights.rows)
    old = capability is not None and capability < FP8_CAPABILITY
    if made is None or (old and made.kind == "fp8"):
        return weights.dequantised(dtype)
    return WalkedStack(made, weights.experts)


class StoredArguments(NamedTuple):
    """What `expert_products.product` needs to know of a weight, and of inputs that it may round."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    table: torch.Tensor | None
    row_bytes: int
    columns: int
    scale_rows: int
    their_columns: int
    kind: str
    rounded: bool
    planes: int
    width: int
    per_group: int
    per_their: int


def stored_arguments(
    x: torch.Tensor, weight: torch.Tensor | WalkedStack, block_k: int
) -> StoredArguments:
    """Of a product of x [T, in]; inputs are rounded here if the format says so."""
    if isinstance(weight, torch.Tensor):
        return StoredArguments(
            *(x, x, weight, weight, None, None, 0, 1, 1, 1), "dense", False, 1, block_k, 0, 0
        )
    rows = weight.rows
    width = rows.width if rows.planes == 2 else min(block_k, rows.width)
    x_scale, their_columns, per_their = x, 1, 0
    if rows.rounding is not None:
        rounded = round_inputs(x, rows.rounding)
        x, x_scale, their_columns = rounded.numbers, *_columns(rounded.scale)
        per_their = 0 if rows.rounding.group is None else rows.rounding.group // width
    numbers = rows.numbers
    if launch.capability(x.device) is None:
        x = x.view(torch.int8) if rows.rounding is not None else x
    elif rows.kind == "fp8":
        numbers = numbers.view(torch.float8_e4m3fn)
    return StoredArguments(
        x,
        x_scale,
        numbers,
        rows.scale,
        rows.zero,
        rows.table,
        rows.numbers.shape[1],
        rows.scale.shape[1],
        rows.scale_rows,
        their_columns,
        rows.kind,
        rows.rounding is not None,
        rows.planes,
        width,
        0 if rows.group is None else max(rows.group // width, 1),
        per_their,
    )


def _columns(scale: torch.Tensor) -> tuple[torch.Tensor, int]:
    return scale, scale.shape[1]
