"""Qwen 3 with mixtures of many small experts, in all layers or in some."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    every,
    experts_of,
    gate_names,
    softmax_routing,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields, served, windows=_windows, qkv_bias=bias, output_bias=bias, qk_norm=True
    )
    routing = softmax_routing(normalised=fields.flag("norm_topk_prob", False))
    experts = experts_of(fields, spec, routing)
    return with_experts(spec, experts, every(fields, len(spec.layers)))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One for all layers, if it is used."""
    used = fields.flag("use_sliding_window", False)
    return (fields.integer("sliding_window", 4096) if used else None,) * layers


QWEN3_MOE = Family(
    ("Qwen3MoeForCausalLM",),
    _spec,
    Names(experts=gate_names()),
    layouts=(stacked(), stacked(transposed=True)),
)
