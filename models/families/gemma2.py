"""Gemma 2: norms on both sides of each branch, soft caps, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.families.family import Family, each_layer, gated_decoder, with_attention
from tokenpod.models.families.qwen2 import windows_by_type
from tokenpod.models.fields import Fields
from tokenpod.models.names import Names
from tokenpod.models.spec import Embedding, Head, LayerSpec, ModelSpec, Norms


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        windows=_windows,
        qkv_bias=bias,
        output_bias=bias,
        head_dim=256,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied=True,
    )
    assert spec.norm is not None
    norm = replace(spec.norm, offset=1)
    scale = fields.real("query_pre_attn_scalar", 256.0) ** -0.5
    softcap = fields.optional_real("attn_logit_softcapping", 50.0)

    def layer(own: LayerSpec) -> LayerSpec:
        return replace(own, norms=Norms(norm, norm, norm, norm))

    capped = with_attention(spec, scale=scale, softcap=softcap)
    return replace(
        each_layer(capped, layer),
        norm=norm,
        embedding=Embedding(scale=spec.hidden_size**0.5),
        head=Head(spec.head.tied, fields.optional_real("final_logit_softcapping", 30.0)),
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The first layer has it, the second not, and so on, unless `layer_types` says otherwise."""
    window = fields.optional_integer("sliding_window", 4096)
    if "layer_types" in fields:
        return windows_by_type(fields, layers, window)
    return tuple(None if layer % 2 else window for layer in range(layers))


GEMMA2 = Family(
    ("Gemma2ForCausalLM",),
    _spec,
    Names(
        attention_out="post_attention_layernorm",
        mlp_in="pre_feedforward_layernorm",
        mlp_out="post_feedforward_layernorm",
    ),
)
