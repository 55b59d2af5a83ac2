"""GPT-2: learned positions, and products whose weights are stored the other way round."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.fields import Fields
from tokenpod.models.names import Fused, Names
from tokenpod.models.spec import Embedding, LayerSpec, ModelSpec, Norm, Norms, Positions

NAMES = Names(
    embedding="wte",
    positions="wpe",
    norm="ln_f",
    layer="h.{i}.",
    qkv=Fused("attn.c_attn"),
    output="attn.c_proj",
    attention_in="ln_1",
    mlp_in="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    surplus=(".attn.bias", ".attn.masked_bias"),
)


def learned_decoder(
    fields: Fields, activation: str, kv_heads: int | None = None
) -> tuple[ModelSpec, float]:
    """What GPT-2 and GPT-BigCode share, and the scale of a layer's logits."""
    fields.only("add_cross_attention", False)
    heads = fields.first("num_attention_heads", "n_head")
    sizes = sizes_of(
        fields,
        hidden=fields.first("hidden_size", "n_embd"),
        layers=fields.first("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=kv_heads or fields.integer(heads),
    )
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5), bias=True)
    width = fields.integer("n_inner", 4 * sizes.hidden, most=1 << 24)
    rows = fields.integer(fields.first("max_position_embeddings", "n_positions"), most=1 << 24)
    layer = LayerSpec(
        sizes.attention(None, bias=True),
        plain_mlp(width, fields.choice("activation_function", ACTIVATIONS, activation), bias=True),
        Norms(attention_in=norm, mlp_in=norm),
    )
    spec = model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=rows,
        layers=(layer,) * sizes.layers,
        norm=norm,
        embedding=Embedding(positions=Positions(rows)),
    )
    return spec, sizes.head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec, scale = learned_decoder(fields, "gelu_new")
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)

    def layer(i: int, own: LayerSpec) -> LayerSpec:
        own_scale = scale / (i + 1) if by_layer else scale
        return replace(own, attention=replace(own.attention, scale=own_scale))

    return replace(spec, layers=tuple(layer(i, own) for i, own in enumerate(spec.layers)))


GPT2 = Family(
    ("GPT2LMHeadModel",), _spec, replace(NAMES, transposed=True), prefixes=("transformer.", "")
)
