"""Llama 1, 2 and 3, and the many models that use its architecture."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, no_windows
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields,
        served,
        windows=no_windows,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


LLAMA = Family(("LlamaForCausalLM",), _spec)
