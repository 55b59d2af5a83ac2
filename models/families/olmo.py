"""OLMo 1: Llama with layer norms that have no weights, and products kept within bounds."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, with_attention
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    norm = Norm("layer", 1e-5, weight=False)
    spec = gated_decoder(fields, served, norm=norm, qkv_bias=bias, output_bias=bias)
    return with_attention(spec, clip=fields.optional_real("clip_qkv", None))


OLMO = Family(("OlmoForCausalLM",), _spec)
