"""Granite: Llama with multipliers of embedding, attention, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, each_layer, gated_decoder, with_attention
from tokenpod.models.specs.spec import Embedding, ModelSpec


def granite_spec(fields: Fields, served: int | None) -> ModelSpec:
    """Llama's decoder with Granite's multipliers."""
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return with_multipliers(spec, fields)


def with_multipliers(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The same with the four multipliers that the config has."""
    scale = fields.real("residual_multiplier", 1.0)
    spec = with_attention(spec, scale=fields.real("attention_multiplier", 1.0))
    return replace(
        each_layer(spec, lambda layer: replace(layer, branch_scale=scale)),
        embedding=Embedding(scale=fields.real("embedding_multiplier", 1.0)),
        head=replace(spec.head, scale=1 / fields.real("logits_scaling", 1.0)),
    )


GRANITE = Family(("GraniteForCausalLM",), granite_spec)
