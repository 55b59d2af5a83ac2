"""compressed-tensors, the layout of llm-compressor (package 0.20.0; format of commit 52792be0).

`config_groups` say which modules (`targets`) have which weights and how products round inputs;
`ignore` leaves modules out. Numbers are stored as they are (`weight`) or packed (`weight_packed`),
with `weight_scale`, `weight_zero_point` and `weight_g_idx`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.kernels.products.formats.rounding import Number, Rounding
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.float4 import Float4Scheme
from tokenpod.models.layouts.floats import Block, Fp8Scheme
from tokenpod.models.layouts.fp8 import block_of
from tokenpod.models.layouts.gptq import group_size
from tokenpod.models.layouts.groups import Grouping
from tokenpod.models.layouts.integers import PackedScheme, SignedScheme
from tokenpod.models.layouts.module import Scheme
from tokenpod.models.layouts.patterns import named, patterns_of

#: What a target may be but the name of a module, or a pattern: the class of all linear modules.
_LINEAR = "Linear"
_INTEGERS = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
#: Of 4 bits with an exponent: how scales are said to be shared, and by how many inputs.
_FLOATS_4 = {
    "nvfp4-pack-quantized": ("nvfp4", "tensor_group", 16),
    "mxfp4-pack-quantized": ("mxfp4", "group", 32),
}


@dataclass(frozen=True, slots=True)
class CompressedTensorsLayout:
    """Groups of modules, and those that are in none."""

    source: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]
    name: str = "compressed-tensors"
    strict: bool = True

    def scheme(self, module: str) -> Scheme | None:
        """By name or pattern first, then by class."""
        if any(named(pattern, module, self.source) for pattern in self.ignore):
            return None
        for targets, scheme in self.groups:
            if any(named(target, module, self.source) for target in targets):
                return scheme
        return next((scheme for targets, scheme in self.groups if _LINEAR in targets), None)


def read_compressed_tensors(fields: Fields) -> CompressedTensorsLayout | None:
    """The layout that a config describes; None: no weights are quantised.

    ModelError, naming the field, if it is another.
    """
    groups = fields.fields("config_groups").values
    if not groups:
        return None
    fields.only("quantization_status", "compressed")
    if "sparsity_config" in fields:
        sparsity = fields.fields("sparsity_config")
        if sparsity.values:
            sparsity.only("format", "dense")
    if fields.values.get("transform_config"):
        raise ModelError(f"{fields.source}: transform_config is not supported")
    return CompressedTensorsLayout(
        fields.source,
        tuple(_group(fields.fields("config_groups"), name, fields) for name in groups),
        patterns_of(fields, "ignore"),
    )


def _group(groups: Fields, name: str, config: Fields) -> tuple[tuple[str, ...], Scheme]:
    fields = groups.fields(name)
    targets = patterns_of(fields, "targets")
    for target in targets:
        if not (target.startswith("re:") or "." in target or target in (_LINEAR, "lm_head")):
            raise ModelError(
                f"{fields.source}: targets names {target!r}; supported are 'Linear', names of "
                "modules, and patterns behind 're:'"
            )
    if fields.values.get("output_activations"):
        raise ModelError(f"{fields.source}: output_activations are not supported")
    form = (fields if "format" in fields else config).text("format")
    weights = fields.fields("weights")
    weights.only("dynamic", False)
    inputs = fields.fields("input_activations") if "input_activations" in fields else None
    kind = weights.choice("type", {"int": "int", "float": "float"}, "int")
    make = _integers if kind == "int" else _floats
    return targets, make(weights, inputs, form, config)


def _integers(weights: Fields, inputs: Fields | None, form: str, config: Fields) -> Scheme:
    symmetric = weights.flag("symmetric", True)
    size = _group_size(weights)
    if form == "pack-quantized":
        bits = weights.one_of("num_bits", (2, 4, 8))
        if inputs is not None:
            raise ModelError(
                f"{inputs.source}: not supported with format 'pack-quantized', whose products "
                "take inputs as they are"
            )
        weights.only("actorder", "weight", "static", "group", "dynamic", False)
        ordered = weights.values.get("actorder") in ("group", "dynamic")
        return PackedScheme(Grouping(bits, size), symmetric, ordered)
    if form not in _INTEGERS:
        raise _unknown(config, form)
    weights.one_of("num_bits", (4, 8))
    weights.only("actorder", "weight", "static", False)
    if inputs is None:
        rounding, static = None, False
    else:
        rounding, static = _rounding(inputs, Number.INT8, "int")
        if size is not None or not symmetric:
            raise ModelError(
                f"{inputs.source}: not supported with weights in groups, or that are not symmetric"
            )
    return SignedScheme(Grouping(8, size), symmetric, rounding, static)


def _group_size(weights: Fields) -> int | None:
    """None: a scale per output, or one for all."""
    strategy = weights.text("strategy", "group" if "group_size" in weights else "tensor")
    weights.only("strategy", "tensor", "channel", "group")
    return group_size(weights) if strategy == "group" else None


def _floats(weights: Fields, inputs: Fields | None, form: str, config: Fields) -> Scheme:
    if form in _FLOATS_4:
        name, strategy, size = _FLOATS_4[form]
        weights.one_of("num_bits", (4,))
        weights.only("symmetric", True)
        weights.only("strategy", strategy)
        weights.only("group_size", size)
        weights.only("actorder", "weight", "static", False)
        return Float4Scheme(name)
    if form not in _FLOATS:
        raise _unknown(config, form)
    weights.one_of("num_bits", (8,))
    weights.only("symmetric", True)
    blocks: dict[str, Block] = {
        "tensor": (None, None),
        "channel": (1, None),
    }
    if weights.values.get("strategy") == "block":
        blocks["block"] = block_of(weights, "block_structure")
    block = weights.choice("strategy", blocks, "tensor")
    rounding, static = (None, False) if inputs is None else _rounding(inputs, Number.FP8, "float")
    return Fp8Scheme(block, rounding, static)


def _rounding(inputs: Fields, number: Number, kind: str) -> tuple[Rounding, bool]:
    """How products round their inputs, and whether each module has a scale for them."""
    inputs.one_of("num_bits", (8,))
    inputs.only("type", kind)
    inputs.only("symmetric", True)
    if inputs.flag("dynamic", False):
        strategy = inputs.choice("strategy", {"token": False, "group": True}, "token")
        return Rounding(number, inputs.integer("group_size") if strategy else None), False
    inputs.only("strategy", "tensor")
    return Rounding(number), True


def _unknown(config: Fields, form: str) -> ModelError:
    return ModelError(
        f"{config.source}: format {form!r} is not supported (supported: 'pack-quantized', "
        "'int-quantized', 'float-quantized', 'naive-quantized', 'nvfp4-pack-quantized', "
        "'mxfp4-pack-quantized', each with its type of weights)"
    )
