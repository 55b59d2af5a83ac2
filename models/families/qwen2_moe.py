"""Qwen 1.5 and 2 with experts, and a shared one whose share each token decides."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    MOST_FEATURES,
    every,
    experts_of,
    gate_names,
    shared_of,
    softmax_routing,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, gated_decoder, windows_by_type
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec = gated_decoder(fields, served, windows=_windows, qkv_bias=fields.flag("qkv_bias", True))
    routing = softmax_routing(normalised=fields.flag("norm_topk_prob", False))
    experts = experts_of(fields, spec, routing)
    shared = fields.integer("shared_expert_intermediate_size", 5632, most=MOST_FEATURES)
    experts = replace(experts, shared=shared_of(experts, shared), shared_gate=True)
    return with_experts(spec, experts, every(fields, len(spec.layers)))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """By layer type; which layers have a window otherwise depends on who reads the config."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * layers
    if "layer_types" not in fields:
        raise ModelError(f"{fields.source}: use_sliding_window is true, but layer_types is missing")
    return windows_by_type(fields, layers, fields.integer("sliding_window", 4096))


QWEN2_MOE = Family(
    ("Qwen2MoeForCausalLM",),
    _spec,
    Names(experts=gate_names(shared="shared_expert")),
    layouts=(stacked(),),
)
