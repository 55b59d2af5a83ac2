"""DeepSeek V2 and V3, and Kimi K2: latent rows in place of keys and values, groups of experts."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    experts_of,
    gate_names,
    shared_of,
    sigmoid_routing,
    sparse_layers,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, attention_of, each_layer, gated_decoder
from tokenpod.models.layers.latent import Latent
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import Rope
from tokenpod.models.layers.rope import yarn_temperature
from tokenpod.models.specs.layer_spec import Experts
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, PredictingNames

#: Of the norms of latents, whatever the config says of others.
_EPSILON = 1e-6


def _v2_spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    routing = Routing(1, normalised=False, scale=fields.real("routed_scaling_factor", 1.0))
    if fields.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"):
        routing = routing._replace(
            groups=fields.integer("n_group"), chosen_groups=fields.integer("topk_group")
        )
    spec = latent_decoder(fields, served, interleaved=True)
    experts = experts_of(fields, spec, routing, count=("n_routed_experts",))
    return _with_shared(spec, fields, experts, shared=2, dense=0)


def _v3_spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    spec = latent_decoder(fields, served, interleaved=fields.flag("rope_interleave", True))
    return with_v3_experts(spec, fields, dense=3)


def with_v3_experts(spec: ModelSpec, fields: Fields, *, dense: int) -> ModelSpec:
    """The same with experts chosen by corrected sigmoids, but for the first layers."""
    count = ("n_routed_experts", "num_local_experts")
    experts = experts_of(fields, spec, sigmoid_routing(fields), count=count)
    return _with_shared(spec, fields, replace(experts, correction=True), shared=1, dense=dense)


def _with_shared(
    spec: ModelSpec, fields: Fields, experts: Experts, *, shared: int, dense: int
) -> ModelSpec:
    """The first layers stay `dense`, unless the config says otherwise; so for the shared ones."""
    fields.only("moe_layer_freq", 1)
    width = fields.integer("n_shared_experts", shared, most=64) * experts.width
    experts = replace(experts, shared=shared_of(experts, width))
    return with_experts(spec, experts, sparse_layers(fields, len(spec.layers), dense=dense))


def latent_decoder(fields: Fields, served: int | None, *, interleaved: bool) -> ModelSpec:
    """Llama's decoder with other attention, whose heads end in the numbers that are rotated."""
    fields.only("attention_bias", False)
    rope_dim = fields.integer("qk_rope_head_dim", 64, most=1 << 10)
    heads = fields.values.get("num_attention_heads")
    same = fields.replacing(head_dim=rope_dim, num_key_value_heads=heads)
    spec = gated_decoder(same, served, interleaved=interleaved)
    own = attention_of(spec.layers[0])
    rope = own.positions
    assert isinstance(rope, Rope)
    nope_dim = fields.integer("qk_nope_head_dim", 128, most=1 << 12)
    # What follows from these two, under names that others write differently.
    fields.only("qk_head_dim", nope_dim + rope_dim)
    fields.only("head_dim", rope_dim, nope_dim, nope_dim + rope_dim)
    # Null is a meaning of its own: queries are made of the stream.
    ranked = fields.values.get("q_lora_rank", 1536) is not None
    norm = Norm("rms", _EPSILON)
    attention = Latent(
        heads=own.heads,
        kv_rank=fields.integer("kv_lora_rank", 512, most=1 << 14),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128, most=1 << 12),
        kv_norm=norm,
        positions=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_temperature(fields) ** 2,
        query_rank=fields.integer("q_lora_rank", 1536, most=1 << 16) if ranked else None,
        query_norm=norm if ranked else None,
    )
    return each_layer(spec, lambda layer: replace(layer, mixer=attention))


NAMES = Names(experts=gate_names(), predicting=PredictingNames())
DEEPSEEK_V2 = Family(("DeepseekV2ForCausalLM",), _v2_spec, NAMES, layouts=(stacked(),))
DEEPSEEK_V3 = Family(("DeepseekV3ForCausalLM",), _v3_spec, NAMES, layouts=(stacked(),))
