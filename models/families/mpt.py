"""MPT: ALiBi, norms without bias, products kept within bounds."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.alibi import alibi_of
from tokenpod.models.families.family import Family, model_spec, plain_mlp, sizes_of
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("no_bias", True)
    fields.only("logit_scale", None)
    fields.only("norm_type", "low_precision_layernorm", "layernorm")
    own = fields.fields("attn_config") if "attn_config" in fields else Fields({}, fields.source)
    own.only("attn_type", "multihead_attention")
    for name, value in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        own.only(name, value)
    sizes = sizes_of(fields, hidden="d_model", layers="n_layers", heads="n_heads")
    norm = Norm("layer", fields.real("layer_norm_epsilon", 1e-5))
    attention = replace(
        sizes.attention(alibi_of(sizes.heads, most=own.integer("alibi_bias_max", 8)), bias=False),
        scale=own.optional_real("softmax_scale", None),
        clip=own.optional_real("clip_qkv", None),
    )
    width = fields.integer("expansion_ratio", 4, most=1 << 8) * sizes.hidden
    mlp = plain_mlp(width, Activation.GELU, bias=False)
    layer = LayerSpec(attention, mlp, Norms(attention_in=norm, mlp_in=norm))
    return model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=fields.integer("max_seq_len", 2048),
        layers=(layer,) * sizes.layers,
        norm=norm,
    )


MPT = Family(
    ("MPTForCausalLM", "MptForCausalLM"),
    _spec,
    Names(
        embedding="wte",
        norm="norm_f",
        layer="blocks.{i}.",
        qkv=Fused("attn.Wqkv"),
        output="attn.out_proj",
        attention_in="norm_1",
        mlp_in="norm_2",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
    ),
    prefixes=("transformer.", ""),
)
