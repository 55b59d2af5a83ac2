"""AWQ's layout (Lin et al. 2023) "gemm", as AutoAWQ writes it.

`qweight` [in, out / 8] and `qzeros` [groups, out / 8] have 8 outputs in a word, in an order of
their own; `scales` is [groups, out] (awq/modules/linear/gemm.py, commit 88e4c76b).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.gptq import group_size
from tokenpod.models.layouts.groups import Grouping
from tokenpod.models.layouts.module import FLOATS, StoredModule
from tokenpod.models.layouts.packing import around, unpacked_awq, words
from tokenpod.models.layouts.patterns import patterns_of
from tokenpod.models.weights.weights import StoredTensor

_WORDS = ("I32",)
_BITS = 4


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """Of one module."""

    grouping: Grouping
    #: Whether groups must have zeros; where they need not, some writers store the middle.
    zeros: bool = True

    @property
    def format(self) -> str:
        """In words."""
        return self.grouping.format

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        groups, columns = self.grouping.count(inputs), words(outputs, _BITS)
        found: dict[str, StoredTensor] = {
            ".qweight": StoredTensor((inputs, columns), _WORDS),
            ".scales": StoredTensor((groups, outputs), FLOATS),
        }
        return {**found, **(self._zeros(outputs, inputs) if self.zeros else {})}

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Zeros that need not be there."""
        return {} if self.zeros else self._zeros(outputs, inputs)

    def _zeros(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        columns = words(outputs, _BITS)
        return {".qzeros": StoredTensor((self.grouping.count(inputs), columns), _WORDS)}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Memory that a part of a weight takes at most, in bytes."""
        return self.grouping.bytes_of(outputs, inputs, whole, scale_bytes, zeros=True)

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight, its groups' whole numbers unpacked and in the order of outputs."""
        groups, read = self.grouping.touched(inputs, module.inputs)
        columns, held = around(outputs, _BITS, module.outputs)
        own = slice(outputs.start - held.start, outputs.stop - held.start)

        def of(ending: str, rows: range) -> torch.Tensor:
            return unpacked_awq(module.read(ending, rows, columns))[:, own].t().contiguous()

        scale = module.read(".scales", groups, outputs).t()
        zero = of(".qzeros", groups) if ".qzeros" in module else None
        weight = self.grouping.held(of(".qweight", read), scale, zero)
        part = range(inputs.start - read.start, inputs.stop - read.start)
        return weight if len(part) == len(read) else weight.inputs(part)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """By `quantization_config`, or by quant_config.json as AutoAWQ first wrote it."""

    scheme_of_all: AwqScheme
    #: AutoAWQ leaves out every module whose name has one of these in it.
    not_converted: tuple[str, ...]
    name: str = "awq"
    #: Nothing says that routers are left out.
    strict: bool = False

    def scheme(self, module: str) -> AwqScheme | None:
        """How a module's weight is held; None: it is dense."""
        left = any(part in module for part in self.not_converted)
        return None if left else self.scheme_of_all


def read_awq(fields: Fields) -> AwqLayout:
    """The layout that a config describes; ModelError, naming the field, if it is another."""
    version = fields.first("format", "version")
    fields.only(version, "gemm", "GEMM")
    fields.only("backend", "autoawq", "auto")
    zeros = fields.flag("zero_point", True)
    bits = fields.one_of(fields.first("w_bit", "bits"), (_BITS,))
    size = group_size(fields, fields.first("q_group_size", "group_size"))
    scheme = AwqScheme(Grouping(bits, size), zeros)
    return AwqLayout(scheme, patterns_of(fields, "modules_to_not_convert"))
