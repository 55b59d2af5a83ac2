"""`quant_method` fp8: blocks as DeepSeek V3 has them, or a scale for a weight as AutoFP8 does.

And fbgemm_fp8: a scale per output and per token, as Meta's own Llama 3.1 405B FP8 has them.

DeepSeek-AI 2024 (arXiv 2412.19437, section 3.3) and the `weight_scale_inv` of its checkpoints,
which multiplies; transformers' FineGrainedFP8Config has the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.floats import PER_TOKEN, Fp8Scheme
from tokenpod.models.layouts.patterns import kept, patterns_of


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """One scheme for all modules but those that are left out."""

    source: str
    scheme_of_all: Fp8Scheme
    not_converted: tuple[str, ...]
    name: str = "fp8"
    strict: bool = True

    def scheme(self, module: str) -> Fp8Scheme | None:
        """How a module's weight is held; None: it is dense."""
        left = any(kept(pattern, module, self.source) for pattern in self.not_converted)
        return None if left else self.scheme_of_all


def read_fp8(fields: Fields) -> Fp8Layout:
    """The layout that a config describes; ModelError, naming the field, if it is another."""
    fields.only("fmt", "e4m3", "float8_e4m3fn")
    # Powers of two are scales like others; they are stored as float32.
    fields.only("scale_fmt", "float", "ue8m0")
    static = fields.choice("activation_scheme", {"dynamic": False, "static": True}, "dynamic")
    if "weight_block_size" in fields:
        if static:
            raise ModelError(
                f"{fields.source}: activation_scheme 'static' is not supported with "
                "weight_block_size (supported: 'dynamic')"
            )
        rows, columns = block_of(fields, "weight_block_size")
        # Inputs have scales for as many of them as weights do.
        rounding = replace(PER_TOKEN, group=columns)
        scheme = Fp8Scheme((rows, columns), rounding, scales=".weight_scale_inv")
    elif "weight_block_size" in fields.values:
        # Null: transformers wrote it, which has names of its own (Ministral 3).
        names = (".weight_scale_inv", ".activation_scale")
        scheme = Fp8Scheme((None, None), PER_TOKEN, static, *names)
    else:
        scheme = Fp8Scheme((None, None), PER_TOKEN, static)
    skipped = patterns_of(fields, "modules_to_not_convert", "ignored_layers", "ignore")
    return Fp8Layout(fields.source, scheme, skipped)


def read_fbgemm_fp8(fields: Fields) -> Fp8Layout:
    """The layout that a config describes; ModelError, naming the field, if it is another.

    `activation_scale_ub` bounds the numbers from which FBGEMM makes a token's scale, and so cuts
    off inputs beyond it. It is read, and nothing is cut off here.
    """
    fields.real("activation_scale_ub", 1200.0)
    skipped = patterns_of(fields, "modules_to_not_convert")
    return Fp8Layout(fields.source, Fp8Scheme((1, None), PER_TOKEN), skipped, name="fbgemm_fp8")


def block_of(fields: Fields, name: str) -> tuple[int, int]:
    """Outputs and inputs of a block."""
    value = fields.values.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(item) is int and 1 <= item <= 1 << 16 for item in value)
    ):
        raise ModelError(f"{fields.source}: {name} is {value!r}; expected two whole numbers")
    return value[0], value[1]
