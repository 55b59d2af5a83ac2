"""StableLM: Llama with layer norms, a part of each head rotated, and perhaps parallel branches."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, each_layer, gated_decoder, with_attention
from tokenpod.models.layers.head_steps import NormOver
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
        qkv_bias=fields.flag("use_qkv_bias", False),
        factor=fields.real("rope_pct", 0.25),
    )
    if fields.flag("qk_layernorm", False):
        own = replace(norm, bias=False)
        spec = with_attention(spec, qk_norm=own, qk_norm_over=NormOver.HEADS)
    if not fields.flag("use_parallel_residual", False):
        return spec

    def in_parallel(layer: LayerSpec) -> LayerSpec:
        return replace(layer, norms=Norms(attention_in=norm, mlp_in=SAME), join=Join.PARALLEL)

    return each_layer(spec, in_parallel)


STABLELM = Family(
    ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    _spec,
    Names(q_norm="self_attn.q_layernorm.norms.{h}", k_norm="self_attn.k_layernorm.norms.{h}"),
)
