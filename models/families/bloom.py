"""BLOOM: ALiBi instead of positions, a norm behind the embedding."""

from __future__ import annotations

from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.alibi import alibi_of
from tokenpod.models.families.family import Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import LayerSpec, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    if fields.flag("apply_residual_connection_post_layernorm", False):
        name = "apply_residual_connection_post_layernorm"
        raise ModelError(f"{fields.source}: {name} is true; only false is supported")
    sizes = sizes_of(
        fields,
        hidden=fields.first("n_embed", "hidden_size"),
        layers=fields.first("n_layer", "num_hidden_layers"),
        heads=fields.first("n_head", "num_attention_heads"),
    )
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5), bias=True)
    width = fields.integer("n_inner", 4 * sizes.hidden, most=1 << 24)
    layer = LayerSpec(
        sizes.attention(alibi_of(sizes.heads), bias=True),
        plain_mlp(width, Activation.GELU_TANH, bias=True),
        Norms(attention_in=norm, mlp_in=norm),
    )
    return model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=fields.integer("seq_length", 2048),
        layers=(layer,) * sizes.layers,
        norm=norm,
        embedding=Embedding(norm=norm),
    )


BLOOM = Family(
    ("BloomForCausalLM",),
    _spec,
    Names(
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        norm="ln_f",
        layer="h.{i}.",
        qkv=Fused("self_attention.query_key_value", by_heads=True),
        output="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    prefixes=("transformer.", ""),
)
