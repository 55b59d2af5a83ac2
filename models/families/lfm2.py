"""LFM2: short convolutions in most layers, attention with normed heads in the others.

With dense feed-forward blocks, or with mixtures of experts behind the first layers.
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import experts_of, stacked, with_experts
from tokenpod.models.families.family import Family, each_layer, gated_decoder
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.short_convolution import ShortConvolution
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertNames, Names, experts_apart

_KINDS = {"conv", "full_attention"}
#: Times two thirds of what the config says, a feed-forward block is wide: 1 in published ones.
_WIDEST = 64.0


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    """As the config says, whose width of a feed-forward block may be one to start from."""
    spec = _mixed(fields, served, "block_ff_dim")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return spec
    # As in transformers, which rounds down at each step, then up to a multiple.
    factor = fields.optional_real("block_ffn_dim_multiplier", 1.0, most=_WIDEST)
    dense = spec.layers[0].mlp
    assert isinstance(dense, Mlp)
    width = int(2 * dense.width / 3)
    if factor is not None:
        many = fields.integer("block_multiple_of", 256)
        width = -(-int(factor * width) // many) * many
    return each_layer(spec, lambda layer: replace(layer, mlp=replace(dense, width=width)))


def _sparse_spec(fields: Fields, served: int | None) -> ModelSpec:
    """With experts in all layers but the first."""
    fields = fields.defaulting(
        num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792, intermediate_size=7168
    )
    spec = _mixed(fields, served, "intermediate_size")
    routing = Routing(
        1,
        fields.flag("norm_topk_prob", True),
        Score.SIGMOID,
        scale=fields.real("routed_scaling_factor", 1.0),
    )
    experts = experts_of(fields, spec, routing)
    experts = replace(experts, correction=fields.flag("use_expert_bias", True))
    dense = fields.count("num_dense_layers", 2)
    return with_experts(spec, experts, range(dense, len(spec.layers)))


def _mixed(fields: Fields, served: int | None, width: str) -> ModelSpec:
    """Of layers of both kinds; `width`: the older name of a feed-forward block's width."""
    if width in fields:
        fields = fields.replacing(intermediate_size=fields.integer(width, most=1 << 24))
    if "tie_embedding" in fields:
        fields = fields.replacing(tie_word_embeddings=fields.flag("tie_embedding", True))
    fields = fields.defaulting(
        intermediate_size=12_288,
        num_key_value_heads=8,
        max_position_embeddings=128_000,
    )
    norm = Norm("rms", fields.real("norm_eps", 1e-5))
    spec = gated_decoder(fields, served, qk_norm=True, norm=norm, tied=True, theta=1e6)
    convolution = ShortConvolution(
        spec.hidden_size,
        fields.integer("conv_L_cache", 3, most=64),
        fields.flag("conv_bias", False),
    )
    kinds = iter(_kinds(fields, len(spec.layers)))

    def layer(own: LayerSpec) -> LayerSpec:
        return replace(own, mixer=convolution) if next(kinds) == "conv" else own

    return each_layer(spec, layer)


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Of each layer; older files number those with attention, of which by default all are."""
    if "layer_types" not in fields:
        attend = fields.indices("full_attn_idxs") if "full_attn_idxs" in fields else range(layers)
        return tuple("full_attention" if i in attend else "conv" for i in range(layers))
    kinds = tuple(fields.texts("layer_types"))
    if len(kinds) != layers or not set(kinds) <= _KINDS:
        raise ModelError(
            f"{fields.source}: layer_types must name conv or full_attention for each of {layers}"
            " layers"
        )
    return kinds


_EXPERTS = experts_apart(
    "feed_forward.gate",
    "feed_forward.experts.{e}",
    "w1",
    "w3",
    "w2",
    correction="feed_forward.expert_bias",
)


def _names(experts: ExpertNames | None = None) -> Names:
    return Names(
        norm="embedding_norm",
        output="self_attn.out_proj",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        attention_in="operator_norm",
        mlp_in="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        experts=experts,
    )


LFM2 = Family(("Lfm2ForCausalLM",), _spec, _names())
LFM2_MOE = Family(
    ("Lfm2MoeForCausalLM",),
    _sparse_spec,
    _names(_EXPERTS),
    layouts=(stacked("feed_forward"),),
)
