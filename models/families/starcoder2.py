"""StarCoder2: layer norms and biases, rotation, and one window for all layers."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, some_window
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("use_bias", True)
    return gated_decoder(
        fields,
        served,
        windows=some_window,
        norm=Norm("layer", fields.real("norm_epsilon", 1e-5), bias=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        tied=True,
    )


STARCODER2 = Family(("Starcoder2ForCausalLM",), _spec, Names(up=("mlp.c_fc",), down="mlp.c_proj"))
