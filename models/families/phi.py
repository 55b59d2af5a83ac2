"""Phi-1, 1.5 and 2: parallel branches behind one norm, biases everywhere, the head's included."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, each_layer, gated_decoder
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import SAME, Join, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    norm = Norm("layer", fields.real("layer_norm_eps", 1e-5), bias=True)
    spec = gated_decoder(
        fields,
        served,
        norm=norm,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=fields.flag("qk_layernorm", False),
        activation=("hidden_act", "gelu_new"),
        gated=False,
        factor=0.5,
    )
    return replace(each_layer(spec, _in_parallel), head=replace(spec.head, bias=True))


def _in_parallel(layer: LayerSpec) -> LayerSpec:
    norms = Norms(attention_in=layer.norms.attention_in, mlp_in=SAME)
    return replace(layer, norms=norms, join=Join.PARALLEL)


PHI = Family(
    ("PhiForCausalLM",),
    _spec,
    Names(
        norm="final_layernorm",
        output="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up=("mlp.fc1",),
        down="mlp.fc2",
    ),
)
