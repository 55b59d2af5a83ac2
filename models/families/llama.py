"""Llama 1, 2 and 3, and the many models that use its architecture."""

from __future__ import annotations

from tokenpod.models.config import DecoderConfig
from tokenpod.models.families.family import Family, gated_decoder, gated_weights, no_windows
from tokenpod.models.fields import Fields


def _config(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields,
        windows=no_windows,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


LLAMA = Family(("LlamaForCausalLM",), config=_config, weights=gated_weights)
