"""Qwen3.5 and 3.6, text: gated delta nets in most layers, gated attention in the others.

With a dense feed-forward block, or with a mixture of experts and a shared one in each layer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tokenpod.kernels.operations.recurrent_ops import MemoryShape
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    MOST_FEATURES,
    experts_of,
    gate_names,
    shared_of,
    softmax_routing,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, each_layer, gated_decoder, with_attention
from tokenpod.models.layers.gated_delta import GatedDeltaNet
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import LayerSpec
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, PredictingNames

_KINDS = {"linear_attention", "full_attention"}


def delta_spec(fields: Fields, served: int | None) -> ModelSpec:
    """Of a model with dense blocks."""
    fields.only("hidden_act", "silu")
    fields.only("attn_output_gate", True)
    bias = fields.flag("attention_bias", False)
    epsilon = fields.real("rms_norm_eps", 1e-6)
    spec = gated_decoder(
        fields.defaulting(max_position_embeddings=32_768),
        served,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=256,
        norm=Norm("rms", epsilon, offset=1),
        factor=0.25,
    )
    kinds = kinds_of(fields, len(spec.layers))
    net = GatedDeltaNet(_shape(fields), epsilon)
    numbers = iter(kinds)

    def layer(own: LayerSpec) -> LayerSpec:
        return replace(own, mixer=net) if next(numbers) == "linear_attention" else own

    return each_layer(with_attention(spec, output_gate=True), layer)


def _shape(fields: Fields) -> MemoryShape:
    return MemoryShape(
        key_heads=fields.integer("linear_num_key_heads", 16, most=1 << 12),
        value_heads=fields.integer("linear_num_value_heads", 32, most=1 << 12),
        key_dim=fields.integer("linear_key_head_dim", 128, most=1 << 12),
        value_dim=fields.integer("linear_value_head_dim", 128, most=1 << 12),
        width=fields.integer("linear_conv_kernel_dim", 4, most=64),
    )


def kinds_of(fields: Fields, layers: int) -> tuple[str, ...]:
    """Of each layer; where a config does not say, every fourth has attention."""
    if "layer_types" not in fields:
        every = fields.integer("full_attention_interval", 4)
        return tuple(
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        )
    kinds = tuple(fields.texts("layer_types"))
    if len(kinds) != layers or not set(kinds) <= _KINDS:
        raise ModelError(
            f"{fields.source}: layer_types must name linear_attention or full_attention for each"
            f" of {layers} layers"
        )
    return kinds


def with_mixtures(
    fields: Fields, spec: ModelSpec, *, normalised: bool, layers: Collection[int] | None = None
) -> ModelSpec:
    """The same with experts, and a shared one whose share each token decides, in these layers."""
    experts = experts_of(fields, spec, softmax_routing(normalised=normalised))
    shared = fields.integer("shared_expert_intermediate_size", 512, most=MOST_FEATURES)
    experts = replace(experts, shared=shared_of(experts, shared), shared_gate=True)
    return with_experts(spec, experts, layers)


def _sparse_spec(fields: Fields, served: int | None) -> ModelSpec:
    # There are no dense blocks whose width could be said.
    width = fields.integer("moe_intermediate_size", 512, most=MOST_FEATURES)
    fields = fields.defaulting(
        intermediate_size=width,
        moe_intermediate_size=width,
        num_experts=256,
        num_experts_per_tok=8,
    )
    return with_mixtures(fields, delta_spec(fields, served), normalised=True)


def predicting(count: int = 0) -> PredictingNames:
    """Of the layer that predicts further tokens; so many where a config does not say."""
    return PredictingNames(
        field="mtp_num_hidden_layers",
        count=count,
        at="mtp.",
        beside=True,
        layer="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        feature_norm="pre_fc_norm_hidden",
        join="fc",
        norm="norm",
    )


_NAMES = Names(predicting=predicting(), beside=("model.visual.",))

QWEN3_5 = Family(("Qwen3_5ForCausalLM",), delta_spec, _NAMES)
QWEN3_5_MOE = Family(
    ("Qwen3_5MoeForCausalLM",),
    _sparse_spec,
    replace(_NAMES, experts=gate_names(shared="shared_expert")),
    layouts=(stacked(), stacked(transposed=True)),
)
