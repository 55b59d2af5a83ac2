"""Arcee (AFM): Llama with squared rectifiers instead of gates."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields,
        served,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=("hidden_act", "relu2"),
        gated=False,
    )


ARCEE = Family(("ArceeForCausalLM",), _spec, Names(up=("mlp.up_proj",)))
