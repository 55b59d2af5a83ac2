"""ModernBERT (Warner et al. 2024): an encoder with rotation, some of whose layers see nearby."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    sizes = sizes_of(fields, kv_heads=fields.integer("num_attention_heads", most=1 << 14))
    positions = fields.integer("max_position_embeddings", 8192)
    biased = fields.flag("norm_bias", False)
    norm = Norm("layer", fields.real("norm_eps", 1e-5), bias=biased)
    bias = fields.flag("mlp_bias", False)
    activation = fields.choice("hidden_activation", ACTIVATIONS, "gelu")
    mlp = Mlp(fields.integer("intermediate_size", most=1 << 24), activation, True, bias, bias)
    ropes = [
        rope_of(
            fields,
            sizes.head_dim,
            positions,
            served=served,
            theta=theta,
            theta_name=name,
            layer_type=kind,
        )
        for name, theta, kind in (
            ("global_rope_theta", 160_000.0, "full_attention"),
            ("local_rope_theta", 10_000.0, "sliding_attention"),
        )
    ]
    # A token sees as many on each side, and itself.
    window = fields.integer("local_attention", 128) // 2 + 1
    layers = []
    for i, near in enumerate(_near(fields, sizes.layers)):
        attention = replace(
            sizes.attention(ropes[near], bias=fields.flag("attention_bias", False)),
            window=window if near else None,
            causal=False,
        )
        # The first layer reads what the embedding's norm has made.
        layers.append(LayerSpec(attention, mlp, Norms(norm if i else None, None, norm)))
    return model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=positions,
        layers=tuple(layers),
        norm=norm,
        embedding=Embedding(norm=norm),
    )


def _near(fields: Fields, layers: int) -> list[bool]:
    """Of each layer, whether it sees a neighbourhood alone."""
    if "layer_types" in fields:
        types = fields.texts("layer_types")
        if len(types) != layers or not {*types} <= {"full_attention", "sliding_attention"}:
            raise ModelError(
                f"{fields.source}: layer_types must name full_attention or sliding_attention for"
                f" each of {layers} layers"
            )
        return [kind == "sliding_attention" for kind in types]
    every = fields.integer("global_attn_every_n_layers", 3)
    return [i % every > 0 for i in range(layers)]


MODERNBERT = Family(
    ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    _spec,
    Names(
        embedding="embeddings.tok_embeddings",
        embedding_norm="embeddings.norm",
        norm="final_norm",
        qkv=Fused("attn.Wqkv"),
        output="attn.Wo",
        attention_in="attn_norm",
        mlp_in="mlp_norm",
        up=Fused("mlp.Wi"),
        down="mlp.Wo",
        beside=("decoder.", "head.", "classifier."),
    ),
)
