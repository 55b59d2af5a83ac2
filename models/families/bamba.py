"""Bamba: Llama with state spaces in most layers, half of each head rotated in the others."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.families.spaces import mamba_of, with_spaces
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields.defaulting(num_key_value_heads=8),
        served,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        factor=0.5,
    )
    attend = fields.indices("attn_layer_indices")
    space = mamba_of(fields, spec.hidden_size, fields.real("rms_norm_eps", 1e-5))
    return with_spaces(spec, space, frozenset(range(len(spec.layers))) - attend)


BAMBA = Family(
    ("BambaForCausalLM",),
    _spec,
    Names(
        norm="final_layernorm",
        mlp_in="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
    ),
)
