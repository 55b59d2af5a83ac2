"""Ernie 4.5 with experts: heads rotated in neighbouring pairs, softmax, a corrected choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenpod.kernels.operations.expert_ops import Routing
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    experts_of,
    gate_names,
    shared_of,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("use_bias", False)
    biases: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}
    fields = fields.defaulting(rms_norm_eps=1e-5, rope_theta=500_000.0)
    spec = gated_decoder(fields, served, tied=True, interleaved=True, **biases)
    routing = Routing(1, normalised=True, least_sum=fields.real("moe_norm_min", 1e-12))
    experts = experts_of(
        fields, spec, routing, count=("moe_num_experts", "num_experts"), chosen="moe_k"
    )
    width = fields.count("moe_num_shared_experts", 2) * experts.width
    shared = shared_of(experts, width, bias=bias) if width else None
    experts = replace(experts, correction=True, shared=shared)
    spec = replace(spec, head=replace(spec.head, bias=bias))
    return with_experts(spec, experts, _sparse_layers(fields, len(spec.layers)))


def _sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    all_of_them = fields.values.get("moe_layer_end_index", -1) in (None, -1)
    end = layers if all_of_them else fields.count("moe_layer_end_index", 0) + 1
    step = fields.integer("moe_layer_interval", 1)
    first = fields.count("moe_layer_start_index", 1)
    return frozenset(i for i in range(first, min(end, layers)) if (i + 1) % step == 0)


ERNIE4_5_MOE = Family(
    ("Ernie4_5_MoeForCausalLM",),
    _spec,
    Names(
        experts=gate_names(
            correction="mlp.moe_statics.e_score_correction_bias", correction_rows=True
        ),
        # What predicts further tokens.
        beyond=("mtp_",),
    ),
    layouts=(stacked(correction="mlp.gate.moe_statics.e_score_correction_bias"),),
)
