"""What GPT-2 and GPT-BigCode share: learned positions, layer norms, biases everywhere."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import ACTIVATIONS, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import LayerSpec, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec, Positions
from tokenpod.models.weights.names import Fused, Names

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
    surplus=(".attn.bias", ".attn.masked_bias", ".crossattention.bias"),
)


def learned_decoder(
    fields: Fields, activation: str, kv_heads: int | None = None
) -> tuple[ModelSpec, float]:
    """The spec, and the scale of a layer's logits."""
    fields.only("add_cross_attention", False)
    heads = kv_heads or fields.integer("n_head")
    sizes = sizes_of(fields, hidden="n_embd", layers="n_layer", heads="n_head", kv_heads=heads)
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5), bias=True)
    width = fields.integer("n_inner", 4 * sizes.hidden, most=1 << 24)
    rows = fields.integer("n_positions", most=1 << 24)
    mlp = plain_mlp(width, fields.choice("activation_function", ACTIVATIONS, activation), bias=True)
    norms = Norms(attention_in=norm, mlp_in=norm)
    layer = LayerSpec(sizes.attention(None, bias=True), mlp, norms)
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
