"""DBRX: layer norms without biases, clipped queries, keys and values, experts in one tensor."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import MOST_EXPERTS, MOST_FEATURES
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import Experts, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertNames, ExpertTensor, Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("tie_word_embeddings", False)
    attn, ffn = fields.fields("attn_config"), fields.fields("ffn_config")
    kv = attn.integer("kv_n_heads", 1, most=1 << 14)
    sizes = sizes_of(fields, hidden="d_model", layers="n_layers", heads="n_heads", kv_heads=kv)
    most, theta = fields.integer("max_seq_len", 2048), attn.real("rope_theta", 10_000.0)
    rope = rope_of(fields, sizes.head_dim, most, served=served, theta=theta)
    clip, norm = attn.optional_real("clip_qkv", None), Norm("layer", 1e-5)
    attention = replace(sizes.attention(rope, bias=False), clip=clip)
    layers = (LayerSpec(attention, _experts(ffn), Norms(norm, mlp_in=norm)),) * sizes.layers
    return model_spec(fields, sizes, tied=False, max_positions=most, layers=layers, norm=norm)


def _experts(ffn: Fields) -> Experts:
    ffn.only("moe_normalize_expert_weights", 1)
    # Null is a meaning of its own.
    normalised = ffn.values.get("moe_normalize_expert_weights", 1) is not None
    count = ffn.integer("moe_num_experts", 4, most=MOST_EXPERTS)
    return Experts(
        count,
        ffn.integer("ffn_hidden_size", 3584, most=MOST_FEATURES),
        ffn.fields("ffn_act_fn").choice("name", ACTIVATIONS),
        Routing(ffn.integer("moe_top_k", 1, most=count), normalised),
    )


_NAMES = Names(
    embedding="wte",
    norm="norm_f",
    layer="blocks.{i}.",
    qkv=Fused("norm_attn_norm.attn.Wqkv"),
    output="norm_attn_norm.attn.out_proj",
    attention_in="norm_attn_norm.norm_1",
    mlp_in="norm_attn_norm.norm_2",
    experts=ExpertNames(
        "ffn.router.layer",
        gate=ExpertTensor("ffn.experts.mlp.w1", flat=True),
        up=ExpertTensor("ffn.experts.mlp.v1", flat=True),
        down=ExpertTensor("ffn.experts.mlp.w2", flat=True, transposed=True),
    ),
)
DBRX = Family(("DbrxForCausalLM",), _spec, _NAMES, prefixes=("transformer.",))
