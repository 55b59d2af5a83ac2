"""GPTQ's layout (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it.

`qweight` [in · bits / 32, out] has numbers packed along the inputs, `qzeros` [groups, out · bits /
32] zeros along the outputs, `scales` is [groups, out], and `g_idx` [in] says which group each input
is in. Layout 1 has zeros less one, layout 2 (`gptq_v2`) as they are: qlinear_cuda_old.py of
AutoGPTQ, commit 9f7d3707, and gptqmodel/nn_modules/qlinear of GPTQModel, commit f4c327a1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.groups import Grouping
from tokenpod.models.layouts.module import FLOATS, StoredModule
from tokenpod.models.layouts.packing import BITS, around, unpacked, words
from tokenpod.models.layouts.patterns import compiled, kept, patterns_of
from tokenpod.models.weights.weights import StoredTensor

_WORDS = ("I32",)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """Of one module."""

    grouping: Grouping
    #: Zeros are stored less one.
    less_one: bool
    #: Inputs may be in any group, and tensors must say in which.
    act_order: bool

    @property
    def format(self) -> str:
        """In words."""
        return self.grouping.format

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        bits, groups = self.grouping.bits, self.grouping.count(inputs)
        found = {
            ".qweight": StoredTensor((words(inputs, bits), outputs), _WORDS),
            ".qzeros": StoredTensor((groups, words(outputs, bits)), _WORDS),
            ".scales": StoredTensor((groups, outputs), FLOATS),
        }
        return {**found, **self._index(inputs)} if self.act_order else found

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Tensors that a module may have besides."""
        return {} if self.act_order else self._index(inputs)

    def _index(self, inputs: int) -> Mapping[str, StoredTensor]:
        return {".g_idx": StoredTensor((inputs,), _WORDS)}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """With zeros, whether or not all are in the middle."""
        return self.grouping.bytes_of(
            outputs, inputs, whole, scale_bytes, zeros=True, ordered=self.act_order
        )

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight. Of inputs that are in no order all groups' scales are kept."""
        index = self._order(module)
        if index is None:
            groups, read = self.grouping.touched(inputs, module.inputs)
            scale, zero = self._scales(module, outputs, groups)
            numbers = self._numbers(module, outputs, read)
            weight = self.grouping.held(numbers, scale, zero)
            own = range(inputs.start - read.start, inputs.stop - read.start)
            return weight if len(own) == len(read) else weight.inputs(own)
        groups = range(self.grouping.count(module.inputs))
        scale, zero = self._scales(module, outputs, groups)
        numbers = self._numbers(module, outputs, inputs)
        return self.grouping.held(numbers, scale, zero, index[inputs.start : inputs.stop])

    def _order(self, module: StoredModule) -> torch.Tensor | None:
        """The group of each input; None: they follow each other."""
        if ".g_idx" not in module:
            return None
        index, groups = module.read(".g_idx").long(), self.grouping.count(module.inputs)
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise ModelError(
                f"tensor {module.name}.g_idx names group {int(index.max())} at most and "
                f"{int(index.min())} at least; there are {groups}"
            )
        regular = torch.arange(module.inputs, device=index.device)
        regular = regular // self.grouping.length(module.inputs)
        return None if torch.equal(index, regular) else index

    def _numbers(self, module: StoredModule, outputs: range, inputs: range) -> torch.Tensor:
        bits = self.grouping.bits
        rows, held = around(inputs, bits, module.inputs)
        packed = module.read(".qweight", rows, outputs)
        numbers = unpacked(packed.t(), bits, len(held))
        return numbers[:, inputs.start - held.start : inputs.stop - held.start]

    def _scales(
        self, module: StoredModule, outputs: range, groups: range
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scale and zero [out, groups]; None: all zeros are in the middle."""
        bits = self.grouping.bits
        scale = module.read(".scales", groups, outputs).t()
        columns, held = around(outputs, bits, module.outputs)
        packed = module.read(".qzeros", groups, columns)
        zero = unpacked(packed, bits, len(held))
        zero = zero[:, outputs.start - held.start : outputs.stop - held.start].t()
        if self.less_one:
            zero = zero + 1 & (1 << bits) - 1
        middle = bool((zero == self.grouping.middle).all())
        return scale, None if middle else zero.contiguous()


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """By `quantization_config`, or by quantize_config.json as AutoGPTQ first wrote it."""

    source: str
    scheme_of_all: GptqScheme
    #: Modules of a layer that are quantised, by the endings of their names; empty: all are.
    among: tuple[str, ...]
    not_converted: tuple[str, ...]
    #: (pattern, what differs; None: dense), the first that matches.
    rules: tuple[tuple[str, GptqScheme | None], ...]
    name: str = "gptq"
    #: Nothing says which modules of a layer are quantised in all cases: routers are not.
    strict: bool = False

    def scheme(self, module: str) -> GptqScheme | None:
        """How a module's weight is held; None: it is dense."""
        for pattern, scheme in self.rules:
            if compiled(pattern, self.source).match(module):
                return scheme
        if any(kept(pattern, module, self.source) for pattern in self.not_converted):
            return None
        if self.among and not module.endswith(self.among):
            return None
        return self.scheme_of_all


def read_gptq(fields: Fields) -> GptqLayout:
    """The layout that a config describes; ModelError, naming the field, if it is another."""
    fields.only("is_marlin_format", False)
    fields.only("pack_dtype", "int32")
    of_all = _scheme(fields.values, fields)
    among: list[str] = []
    for group in fields.values.get("modules_in_block_to_quantize") or ():
        among += group if isinstance(group, list) else [group]
    if not all(isinstance(name, str) for name in among):
        raise ModelError(f"{fields.source}: modules_in_block_to_quantize lists no names")
    return GptqLayout(
        fields.source,
        of_all,
        tuple(f".{name}" for name in among),
        patterns_of(fields, "modules_to_not_convert"),
        tuple(_rules(fields)) if "dynamic" in fields else (),
    )


def _rules(fields: Fields) -> list[tuple[str, GptqScheme | None]]:
    """GPTQModel's: `-:` leaves out what matches, `+:` or nothing changes some fields for it."""
    rules: list[tuple[str, GptqScheme | None]] = []
    found = fields.fields("dynamic").values
    patterns_of(Fields({"dynamic": list(found)}, fields.source), "dynamic")
    for pattern, changes in found.items():
        expression = pattern.removeprefix("-:").removeprefix("+:")
        compiled(expression, fields.source)
        if pattern.startswith("-:"):
            rules.append((expression, None))
            continue
        if not isinstance(changes, dict):
            raise ModelError(f"{fields.source}: dynamic: {pattern[:80]!r} has no object")
        same = {key: value for key, value in fields.values.items() if key != "dynamic"}
        rules.append((expression, _scheme({**same, **changes}, fields)))
    return rules


def _scheme(values: Mapping[str, Any], fields: Fields) -> GptqScheme:
    own = Fields(values, fields.source)
    form = own.first("checkpoint_format", "format")
    less_one = own.choice(form, {"gptq": True, "gptq_v2": False}, "gptq")
    bits = own.one_of("bits", BITS)
    return GptqScheme(
        Grouping(bits, group_size(own)), less_one, act_order=own.flag("desc_act", False)
    )


def group_size(fields: Fields, name: str = "group_size", default: int = 128) -> int | None:
    """Inputs that share a scale; -1 is all of them."""
    if fields.values.get(name) == -1:
        return None
    return fields.integer(name, default, most=1 << 20)
