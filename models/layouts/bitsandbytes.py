"""bitsandbytes as transformers saves it: 4 bits of a table (nf4, fp4), or 8 bits per output.

4 bits (Dettmers et al. 2023): `weight` has two numbers in a byte, the first in the high bits, row
after row; each 64 of them (`blocksize`) share `weight.absmax`, which may have 8 bits itself and
then a table, scales and an offset of its own. 8 bits (Dettmers et al. 2022): `SCB` is each row's
largest number, which 127 stands for. As bitsandbytes 0.50.2 writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.kernels.products.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.products.formats.int8 import MOST, Int8Weight
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.floats import positive
from tokenpod.models.layouts.module import FLOATS, StoredModule
from tokenpod.models.layouts.patterns import kept, patterns_of
from tokenpod.models.weights.weights import StoredTensor

_BLOCK = 64
_NESTED_BLOCK = 256
#: Bytes of the JSON that describes a weight: published ones have some 200.
_MOST_STATE = 4096


@dataclass(frozen=True, slots=True)
class Bits4Scheme:
    """Of one module."""

    #: "nf4" or "fp4".
    kind: str
    #: Scales of 8 bits.
    nested: bool

    @property
    def format(self) -> str:
        """In words."""
        return self.kind

    @property
    def _state(self) -> str:
        return f".weight.quant_state.bitsandbytes__{self.kind}"

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        numbers = outputs * inputs
        blocks = -(-numbers // _BLOCK)
        found = {
            ".weight.absmax": StoredTensor((blocks,), ("U8",) if self.nested else ("F32",)),
            ".weight": StoredTensor((-(-numbers // 2), 1), ("U8",)),
            ".weight.quant_map": StoredTensor((16,), ("F32",)),
        }
        if self.nested:
            nested = -(-blocks // _NESTED_BLOCK)
            found[".weight.nested_absmax"] = StoredTensor((nested,), ("F32",))
            found[".weight.nested_quant_map"] = StoredTensor((256,), ("F32",))
        others = tuple((length,) for length in range(2, _MOST_STATE))
        return found | {self._state: StoredTensor((1,), ("U8",), others)}

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """Nothing."""
        return {}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Half a byte per number, a scale per block, an index and the table."""
        blocks = -(-len(inputs) // gcd(_BLOCK, inputs.start))
        rows = len(outputs) * (-(-len(inputs) // 2) + 4 * blocks)
        return rows + 4 * len(inputs) + 64

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight of 4 bits, its blocks' scales computed."""
        offset = self._check(module)
        width = module.inputs
        first, end = outputs.start * width // 2, outputs.stop * width // 2
        packed = module.read(".weight", range(first, end)).view(len(outputs), -1)
        codes = torch.stack((packed >> 4, packed & 15), dim=2).flatten(1)
        blocks = width // _BLOCK
        scale = self._scales(module, offset).view(-1, blocks)[outputs.start : outputs.stop]
        weight = GroupedWeight(
            packed_pairs(codes),
            scale.contiguous(),
            (torch.arange(width, device=module.device) // _BLOCK).to(torch.int32),
            table=module.read(".weight.quant_map"),
        )
        return weight if len(inputs) == width else weight.inputs(inputs)

    def _scales(self, module: StoredModule, offset: float) -> torch.Tensor:
        """[blocks of the whole weight] float32."""
        if not self.nested:
            return positive(module, ".weight.absmax")
        codes = module.read(".weight.absmax").int()
        table = module.read(".weight.nested_quant_map")
        scales = positive(module, ".weight.nested_absmax").repeat_interleave(_NESTED_BLOCK)
        return table[codes] * scales[: len(codes)] + offset

    def _check(self, module: StoredModule) -> float:
        """The offset of the scales; ModelError for a weight that is held otherwise."""
        name = module.name + self._state
        try:
            values = json.loads(bytes(module.read(self._state).cpu().tolist()))
        except ValueError as error:
            raise ModelError(f"tensor {name} is no JSON ({error})") from None
        if not isinstance(values, dict):
            raise ModelError(f"tensor {name} is no JSON object")
        state = Fields(values, f"tensor {name}")
        state.only("quant_type", self.kind)
        state.only("blocksize", _BLOCK)
        state.only("nested_blocksize", _NESTED_BLOCK)
        state.only("shape", [module.outputs, module.inputs])
        if module.inputs % _BLOCK:
            raise ModelError(
                f"{module.name} has {module.inputs} inputs: blocks of {_BLOCK} reach from one "
                "row into the next, which is not supported"
            )
        return state.real("nested_offset") if self.nested else 0.0


@dataclass(frozen=True, slots=True)
class Bits8Scheme:
    """Of one module. Products are made with inputs as they are, which loses nothing."""

    format: str = "int8"

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """A module's tensors, by the endings of their names."""
        return {
            ".SCB": StoredTensor((outputs,), FLOATS),
            ".weight": StoredTensor((outputs, inputs), ("I8",)),
        }

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """In which order rows lie: in theirs."""
        return {".weight_format": StoredTensor((), ("U8",))}

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """Memory that a part of a weight takes at most, in bytes."""
        return Int8Weight.bytes_of(outputs, inputs)

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """A part of a weight of 8 bits."""
        if ".weight_format" in module and int(module.read(".weight_format")) != 0:
            raise ModelError(
                f"tensor {module.name}.weight_format says that numbers lie as some GPU wants "
                "them; supported is 0, row by row"
            )
        scale = positive(module, ".SCB")[outputs.start : outputs.stop] / MOST
        return Int8Weight(module.read(".weight", outputs, inputs).contiguous(), scale)


@dataclass(frozen=True, slots=True)
class BitsAndBytesLayout:
    """One scheme for all modules but those that are left out."""

    source: str
    scheme_of_all: Bits4Scheme | Bits8Scheme
    not_converted: tuple[str, ...]
    name: str = "bitsandbytes"
    #: A config that names none leaves out what the quantising version of transformers chose.
    strict: bool = False

    def scheme(self, module: str) -> Bits4Scheme | Bits8Scheme | None:
        """How a module's weight is held; None: it is dense."""
        left = any(kept(pattern, module, self.source) for pattern in self.not_converted)
        return None if left else self.scheme_of_all


def read_bitsandbytes(fields: Fields) -> BitsAndBytesLayout:
    """The layout that a config describes; ModelError, naming the field, if it is another."""
    skipped = patterns_of(fields, "llm_int8_skip_modules")
    four = fields.flag(fields.first("load_in_4bit", "_load_in_4bit"), False)
    eight = fields.flag(fields.first("load_in_8bit", "_load_in_8bit"), False)
    if four == eight:
        raise ModelError(
            f"{fields.source}: load_in_4bit is {four} and load_in_8bit is {eight}; expected one"
        )
    if eight:
        return BitsAndBytesLayout(fields.source, Bits8Scheme(), skipped)
    fields.only("bnb_4bit_quant_storage", "uint8")
    kind = fields.choice("bnb_4bit_quant_type", {"nf4": "nf4", "fp4": "fp4"}, "fp4")
    nested = fields.flag("bnb_4bit_use_double_quant", False)
    return BitsAndBytesLayout(fields.source, Bits4Scheme(kind, nested), skipped)
