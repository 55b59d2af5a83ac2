"""Nemotron and Minitron: layer norms around one, squared rectifiers, half of each head rotated."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields,
        served,
        norm=Norm("layer", fields.real("norm_eps", 1e-5), offset=1, bias=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        activation=("hidden_act", "relu2"),
        gated=False,
        factor=fields.real("rope_percent", 0.5),
    )


NEMOTRON = Family(("NemotronForCausalLM",), _spec, Names(up=("mlp.up_proj",)))
