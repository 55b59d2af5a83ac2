"""Hunyuan 3 (Hy3): norms of heads, and experts chosen by corrected sigmoids beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    experts_of,
    gate_names,
    shared_of,
    sparse_layers,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields.defaulting(rms_norm_eps=1e-5),
        served,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=True,
        head_dim=128,
        theta=11_158_840.0,
    )
    scale = fields.real("router_scaling_factor", 2.826)
    routing = Routing(1, normalised=True, score=Score.SIGMOID, scale=scale, least_sum=1e-20)
    experts = experts_of(fields, spec, routing)
    width = fields.integer("num_shared_experts", 1, most=64) * experts.width
    shared = shared_of(experts, width, bias=fields.flag("mlp_bias", False))
    experts = replace(experts, correction=True, shared=shared)
    return with_experts(spec, experts, sparse_layers(fields, len(spec.layers), dense=1))


_GATES = gate_names(correction="mlp.e_score_correction_bias")
HY_V3 = Family(
    ("HYV3ForCausalLM",),
    _spec,
    Names(
        experts=replace(
            gate_names(shared="shared_mlp", correction="mlp.expert_bias"), router="mlp.router.gate"
        ),
        # Layers beyond the last one predict further tokens.
        beyond=("layers.{layers}.",),
    ),
    layouts=(
        stacked(
            router=_GATES.router,
            correction=_GATES.correction,
            shared_up=_GATES.shared_up,
            shared_down=_GATES.shared_down,
        ),
    ),
)
