"""Falcon: 7b (one key/value head, one norm), 40b and 180b (groups, two norms), rw (ALiBi)."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.alibi import alibi_of
from tokenpod.models.families.family import (
    ACTIVATIONS,
    Family,
    Sizes,
    model_spec,
    plain_mlp,
    sizes_of,
)
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Alibi, Rope
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import SAME, Join, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    newer, bias = fields.flag("new_decoder_architecture", False), fields.flag("bias", False)
    sizes = sizes_of(fields, kv_heads=_kv_heads(fields, newer=newer))
    max_positions = fields.integer("max_position_embeddings", 2048)
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5), bias=True)
    parallel = newer or fields.flag("parallel_attn", True)
    two = not parallel or (newer and fields.integer("num_ln_in_parallel_attn", 2, most=2) == 2)
    layer = LayerSpec(
        sizes.attention(_positions(fields, sizes, max_positions, served), bias=bias),
        plain_mlp(
            fields.integer("ffn_hidden_size", 4 * sizes.hidden, most=1 << 24),
            fields.choice("activation", ACTIVATIONS, "gelu"),
            bias=bias,
        ),
        Norms(attention_in=norm, mlp_in=norm if two else SAME),
        Join.PARALLEL if parallel else Join.SEQUENTIAL,
    )
    layers = (layer,) * sizes.layers
    return model_spec(
        fields, sizes, tied=True, max_positions=max_positions, layers=layers, norm=norm
    )


def _kv_heads(fields: Fields, *, newer: bool) -> str | int:
    """The newer layout has groups; the older one head for all, or one for each."""
    if newer:
        return "num_kv_heads"
    return 1 if fields.flag("multi_query", True) else fields.integer("num_attention_heads")


def _positions(
    fields: Fields, sizes: Sizes, max_positions: int, served: int | None
) -> Rope | Alibi:
    """Unlike others' slopes, these are scaled together with the logits."""
    if fields.flag("alibi", False):
        return alibi_of(sizes.heads, sizes.head_dim**-0.5)
    return rope_of(fields, sizes.head_dim, max_positions, served=served)


def _names(spec: ModelSpec) -> Names:
    """Two norms have names of their own where the branches are parallel."""
    layer = spec.layers[0]
    own = layer.join is Join.PARALLEL and layer.norms.mlp_in is not SAME
    return Names(
        embedding="word_embeddings",
        norm="ln_f",
        layer="h.{i}.",
        qkv=Fused("self_attention.query_key_value", by_heads=True),
        output="self_attention.dense",
        attention_in="ln_attn" if own else "input_layernorm",
        mlp_in="ln_mlp" if own else "post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    )


FALCON = Family(("FalconForCausalLM",), _spec, _names, prefixes=("transformer.", ""))
