"""What NVIDIA's ModelOpt exports: hf_quant_config.json, or the same in config.json.

One scale for a weight and one for all inputs of its products (`quant_algo` FP8), or one per output
and per token (FP8_PER_CHANNEL_PER_TOKEN). Names of modules that are left out may have `*` in them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.layouts.floats import PER_TOKEN, Fp8Scheme
from tokenpod.models.layouts.patterns import excluded, patterns_of

_SCHEMES = {
    "FP8": Fp8Scheme((None, None), PER_TOKEN, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Scheme((1, None), PER_TOKEN),
}


@dataclass(frozen=True, slots=True)
class ModelOptLayout:
    """One scheme for all modules but those that are left out."""

    scheme_of_all: Fp8Scheme
    left_out: tuple[str, ...]
    name: str = "modelopt"
    strict: bool = True

    def scheme(self, module: str) -> Fp8Scheme | None:
        """How a module's weight is held; None: it is dense."""
        left = any(excluded(pattern, module) for pattern in self.left_out)
        return None if left else self.scheme_of_all


def read_modelopt(fields: Fields) -> ModelOptLayout | None:
    """The layout that a config describes; None: only keys and values have scales.

    ModelError, naming the field, if it is another.
    """
    own = fields.fields("quantization") if "quantization" in fields else fields
    if "quant_algo" not in own:
        return None
    scheme = own.choice("quant_algo", _SCHEMES)
    own.only("kv_cache_quant_algo", "FP8")
    return ModelOptLayout(scheme, patterns_of(own, "exclude_modules", "ignore"))
