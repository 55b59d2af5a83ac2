"""Modules whose weights are numbers of 8 bits with an exponent (e4m3), by four ways to scale them.

Each layout of checkpoints names its tensors otherwise, and means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.fp8 import Fp8Weight
from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layouts.module import FLOATS, StoredModule
from tokenpod.models.weights.weights import StoredTensor

_NUMBERS = ("F8_E4M3",)

#: Outputs and inputs that share a scale; None for either: all of them.
Block = tuple[int | None, int | None]


def scale_shapes(*shapes: tuple[int, ...]) -> StoredTensor:
    """A tensor of scales, which others write in another of these shapes."""
    return StoredTensor(shapes[0], FLOATS, shapes[1:])


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Of one module."""

    block: Block
    #: How products round their inputs; `static` is read from the module if it is asked for.
    rounding: Rounding | None
    #: Whether the module has a scale for all inputs of products.
    static: bool = False
    #: Ending of the name of the weight's scales, and of the inputs'.
    scales: str = ".weight_scale"
    input_scale: str = ".input_scale"

    @property
    def format(self) -> str:
        """In words."""
        return "fp8"

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        found = {
            self.scales: self._scales(outputs, inputs),
            ".weight": StoredTensor((outputs, inputs), _NUMBERS),
        }
        if self.static:
            found[self.input_scale] = scale_shapes((1,), ())
        return found

    def _scales(self, outputs: int, inputs: int) -> StoredTensor:
        rows, columns = self.block
        if rows is None:
            return scale_shapes((1,), (), (1, 1))
        if columns is None:
            return scale_shapes((outputs, 1), (outputs,))
        return scale_shapes((-(-outputs // rows), -(-inputs // columns)))

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Nothing."""
        return {}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Memory that a part of a weight takes at most, in bytes."""
        rows, columns = self.block
        if rows is None or columns is None:
            return Fp8Weight.bytes_of(outputs, inputs)
        # Where a block is cut, rows have scales of their own, or blocks are narrower; beside others
        # in one product, a part that ends inside a block is cut too.
        cut = outputs.start % rows or len(outputs) % rows
        blocks = -(-len(inputs) // gcd(columns, inputs.start))
        scales = len(outputs) if cut else -(-len(outputs) // rows)
        return len(outputs) * len(inputs) + 4 * scales * blocks

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight, with the scales of its blocks, rows or of the whole."""
        rounding = self.rounding
        if self.static and rounding is not None:
            rounding = replace(rounding, static=input_scale(module, self.input_scale))
        rows, columns = self.block
        if rows is None or columns is None:
            numbers = module.read(".weight", outputs, inputs)
            scale = positive(module, self.scales).reshape(-1)
            if rows is not None:
                scale = scale[outputs.start : outputs.stop]
            return Fp8Weight.of(numbers, scale, rounding)
        return self._blocks(module, outputs, inputs, rows, columns, rounding)

    def _blocks(
        self,
        module: StoredModule,
        outputs: range,
        inputs: range,
        rows: int,
        columns: int,
        rounding: Rounding | None,
    ) -> Fp8Weight:
        """All blocks that the part is in are read, and what is not of it is cut off."""
        down = range(outputs.start // rows, -(-outputs.stop // rows))
        along = range(inputs.start // columns, -(-inputs.stop // columns))
        read = (
            range(down.start * rows, min(down.stop * rows, module.outputs)),
            range(along.start * columns, min(along.stop * columns, module.inputs)),
        )
        scale = positive(module, self.scales)[
            down.start : down.stop, along.start : along.stop
        ].contiguous()
        weight = Fp8Weight(module.read(".weight", *read), scale, rows, columns, rounding)
        if len(read[0]) != len(outputs):
            first = outputs.start - read[0].start
            weight = weight.outputs(slice(first, first + len(outputs)))
        if len(read[1]) != len(inputs):
            first = inputs.start - read[1].start
            weight = weight.inputs(range(first, first + len(inputs)))
        return weight


def input_scale(module: StoredModule, ending: str = ".input_scale") -> torch.Tensor:
    """The scale of all inputs, [] float32."""
    return positive(module, ending).reshape(())


def positive(module: StoredModule, ending: str) -> torch.Tensor:
    """Scales as float32; ModelError if one is no number, or below zero."""
    scale = module.read(ending).float()
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise ModelError(f"tensor {module.name}{ending} holds a scale that is no positive number")
    return scale


#: A scale for each token, from its largest number.
PER_TOKEN = Rounding(Number.FP8)
