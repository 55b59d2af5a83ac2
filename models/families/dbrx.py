"""DBRX: layer norms without biases, clipped queries, keys and values, experts in one tensor."""

from __future__ import annotations

from tokenpod.kernels.ops import Routing
from tokenpod.models.expert_names import ExpertNames, ExpertTensor
from tokenpod.models.families.experts import MOST_EXPERTS, MOST_FEATURES
from tokenpod.models.families.family import ACTIVATIONS, Family, model_spec, sizes_of
from tokenpod.models.fields import Fields
from tokenpod.models.names import Fused, Names
from tokenpod.models.rope import rope_of
from tokenpod.models.spec import Attention, Experts, LayerSpec, ModelSpec, Norm, Norms


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    attn = fields.fields("attn_config")
    sizes = sizes_of(
        fields,
        hidden="d_model",
        layers="n_layers",
        heads="n_heads",
        kv_heads=attn.integer("kv_n_heads", 1, most=1 << 14),
    )
    positions = fields.integer("max_seq_len", 2048)
    theta = attn.real("rope_theta", 10_000.0)
    attention = Attention(
        sizes.heads,
        sizes.kv_heads,
        sizes.head_dim,
        rope_of(fields, sizes.head_dim, positions, served=served, theta=theta),
        clip=attn.optional_real("clip_qkv", None),
    )
    norm = Norm("layer", 1e-5)
    layer = LayerSpec(attention, _experts(fields.fields("ffn_config")), Norms(norm, mlp_in=norm))
    layers = (layer,) * sizes.layers
    return model_spec(fields, sizes, tied=False, max_positions=positions, layers=layers, norm=norm)


def _experts(ffn: Fields) -> Experts:
    ffn.only("moe_normalize_expert_weights", 1)
    activation = ffn.defaulting(ffn_act_fn={"name": "silu"}).fields("ffn_act_fn")
    count = ffn.integer("moe_num_experts", 4, most=MOST_EXPERTS)
    return Experts(
        count,
        ffn.integer("ffn_hidden_size", 3584, most=MOST_FEATURES),
        activation.choice("name", ACTIVATIONS),
        Routing(
            ffn.integer("moe_top_k", 1, most=count),
            # Null is a meaning of its own.
            normalised=ffn.values.get("moe_normalize_expert_weights", 1) is not None,
        ),
    )


DBRX = Family(
    ("DbrxForCausalLM",),
    _spec,
    Names(
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
    ),
    prefixes=("transformer.",),
)
