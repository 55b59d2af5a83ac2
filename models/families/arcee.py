"""Arcee (AFM): Llama with squared rectifiers instead of gates."""

from __future__ import annotations

from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.fields import Fields
from tokenpod.models.names import Names
from tokenpod.models.spec import ModelSpec


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
