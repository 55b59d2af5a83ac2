"""GPT-NeoX and Pythia: parallel branches, and a quarter of each head rotated."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.rope import DEFAULT_THETA, rope_of
from tokenpod.models.specs.layer_spec import Join, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    sizes, bias = sizes_of(fields), fields.flag("attention_bias", True)
    norm = Norm("layer", fields.real("layer_norm_eps", 1e-5), bias=True)
    max_positions = fields.integer("max_position_embeddings")
    factor, theta = fields.real("rotary_pct", 0.25), fields.real("rotary_emb_base", DEFAULT_THETA)
    layer = LayerSpec(
        sizes.attention(
            rope_of(
                fields, sizes.head_dim, max_positions, served=served, factor=factor, theta=theta
            ),
            bias=bias,
        ),
        plain_mlp(
            fields.integer("intermediate_size", most=1 << 24),
            fields.choice("hidden_act", ACTIVATIONS, "gelu"),
            bias=True,
        ),
        Norms(attention_in=norm, mlp_in=norm),
        Join.PARALLEL if fields.flag("use_parallel_residual", True) else Join.SEQUENTIAL,
    )
    layers = (layer,) * sizes.layers
    return model_spec(
        fields, sizes, tied=False, max_positions=max_positions, layers=layers, norm=norm
    )


GPT_NEOX = Family(
    ("GPTNeoXForCausalLM",),
    _spec,
    Names(
        embedding="embed_in",
        norm="final_layer_norm",
        head="embed_out",
        qkv=Fused("attention.query_key_value", by_heads=True),
        output="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        surplus=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    prefixes=("gpt_neox.", ""),
)
