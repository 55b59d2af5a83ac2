"""Modules of compressed-tensors whose weights are whole numbers: packed, or of 8 bits as they are.

`weight_packed` [out, in · bits / 32] has numbers plus half their range, `weight_zero_point` [out ·
bits / 32, groups] zeros likewise, packed along the outputs (pack_quantized/helpers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.int8 import Int8Weight
from tokenpod.kernels.products.formats.rounding import Rounding
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layouts.floats import input_scale, scale_shapes
from tokenpod.models.layouts.groups import MIDDLE, Grouping
from tokenpod.models.layouts.module import StoredModule
from tokenpod.models.layouts.packing import around, unpacked, words
from tokenpod.models.weights.weights import StoredTensor

_WORDS = ("I32",)


def _scales(grouping: Grouping, outputs: int, inputs: int) -> StoredTensor:
    groups = grouping.count(inputs)
    # One scale for all is stored as [1].
    return scale_shapes((outputs, groups), *(((1,), (outputs,)) if groups == 1 else ()))


def _cut(scale: torch.Tensor, outputs: range, groups: range, whole: int) -> torch.Tensor:
    """Scales of these outputs and groups, however many there are in the file."""
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(whole, 1)
    scale = scale.reshape(whole, -1)
    return scale[outputs.start : outputs.stop, groups.start : groups.stop].contiguous()


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Numbers packed along the inputs."""

    grouping: Grouping
    symmetric: bool
    #: Inputs are in any group, and `weight_g_idx` says in which.
    act_order: bool

    @property
    def format(self) -> str:
        """In words."""
        return self.grouping.format

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        bits, groups = self.grouping.bits, self.grouping.count(inputs)
        found = {
            ".weight_packed": StoredTensor((outputs, words(inputs, bits)), _WORDS),
            ".weight_scale": _scales(self.grouping, outputs, inputs),
        }
        if not self.symmetric:
            found[".weight_zero_point"] = StoredTensor((words(outputs, bits), groups), _WORDS)
        if self.act_order:
            found[".weight_g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return found

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """The shape, which follows from config.json."""
        return {".weight_shape": StoredTensor((2,), ("I64", "I32"))}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Memory that a part of a weight takes at most, in bytes."""
        zeros = not self.symmetric
        return self.grouping.bytes_of(
            outputs, inputs, whole, scale_bytes, zeros=zeros, ordered=self.act_order
        )

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight, unpacked."""
        _check_shape(module)
        if not self.act_order:
            groups, read = self.grouping.touched(inputs, module.inputs)
            weight = self._read(module, outputs, read, groups, None)
            own = range(inputs.start - read.start, inputs.stop - read.start)
            return weight if len(own) == len(read) else weight.inputs(own)
        groups = range(self.grouping.count(module.inputs))
        index = module.read(".weight_g_idx").long()
        if int(index.min()) < 0 or int(index.max()) >= len(groups):
            raise ModelError(
                f"tensor {module.name}.weight_g_idx names a group beyond {len(groups)}"
            )
        return self._read(module, outputs, inputs, groups, index[inputs.start : inputs.stop])

    def _read(
        self,
        module: StoredModule,
        outputs: range,
        inputs: range,
        groups: range,
        index: torch.Tensor | None,
    ) -> QuantisedWeight:
        bits = self.grouping.bits
        columns, held = around(inputs, bits, module.inputs)
        packed = module.read(".weight_packed", outputs, columns)
        numbers = unpacked(packed, bits, len(held))
        numbers = numbers[:, inputs.start - held.start : inputs.stop - held.start]
        scale = _cut(module.read(".weight_scale"), outputs, groups, module.outputs)
        zero = None
        if not self.symmetric:
            rows, held = around(outputs, bits, module.outputs)
            zeros = unpacked(module.read(".weight_zero_point", rows, groups).t(), bits, len(held))
            zero = zeros.t()[outputs.start - held.start : outputs.stop - held.start].contiguous()
        return self.grouping.held(numbers, scale, zero, index)


def _check_shape(module: StoredModule) -> None:
    if ".weight_shape" not in module:
        return
    shape = module.read(".weight_shape").tolist()
    if shape != [module.outputs, module.inputs]:
        raise ModelError(
            f"tensor {module.name}.weight_shape says {shape}; config.json says "
            f"{[module.outputs, module.inputs]}"
        )


@dataclass(frozen=True, slots=True)
class SignedScheme:
    """Numbers of 8 bits as they are, and how products round their inputs."""

    grouping: Grouping
    symmetric: bool
    rounding: Rounding | None
    #: Whether the module has a scale for all inputs of products.
    static: bool

    @property
    def format(self) -> str:
        """In words."""
        return "int8" if self.rounding is None else "int8 W8A8"

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        groups = self.grouping.count(inputs)
        found = {
            ".weight_scale": _scales(self.grouping, outputs, inputs),
            ".weight": StoredTensor((outputs, inputs), ("I8",)),
        }
        if not self.symmetric:
            others = ((1,), (outputs,)) if groups == 1 else ()
            found[".weight_zero_point"] = StoredTensor((outputs, groups), ("I8",), others)
        if self.static:
            found[".input_scale"] = scale_shapes((1,), ())
        return found

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Nothing."""
        return {}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Memory that a part of a weight takes at most, in bytes."""
        return self.grouping.bytes_of(outputs, inputs, whole, scale_bytes, zeros=not self.symmetric)

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight, unpacked."""
        groups, read = self.grouping.touched(inputs, module.inputs)
        scale = _cut(module.read(".weight_scale"), outputs, groups, module.outputs)
        if self.grouping.size is None and self.symmetric:
            numbers = module.read(".weight", outputs, inputs).contiguous()
            rounding = self.rounding
            if self.static and rounding is not None:
                rounding = replace(rounding, static=input_scale(module))
            return Int8Weight(numbers, scale[:, 0].float().contiguous(), rounding)
        numbers = _unsigned(module.read(".weight", outputs, read))
        zero = None
        if not self.symmetric:
            zero = _cut(module.read(".weight_zero_point"), outputs, groups, module.outputs)
            zero = _unsigned(zero)
        weight = self.grouping.held(numbers, scale, zero)
        own = range(inputs.start - read.start, inputs.stop - read.start)
        return weight if len(own) == len(read) else weight.inputs(own)


def _unsigned(numbers: torch.Tensor) -> torch.Tensor:
    """Int8 -> uint8, half the range higher."""
    return (numbers.to(torch.int16) + MIDDLE).to(torch.uint8)
