"""GraniteMoE: Granite with stacked experts, and in some models a shared one."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    MOST_FEATURES,
    experts_of,
    shared_of,
    softmax_routing,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family
from tokenpod.models.families.granite import granite_spec
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import ExpertNames, ExpertTensor, Fused, Half, Names

EXPERTS = ExpertNames(
    "block_sparse_moe.router.layer",
    ExpertTensor("block_sparse_moe.input_linear.weight", Half.FIRST),
    ExpertTensor("block_sparse_moe.input_linear.weight", Half.SECOND),
    ExpertTensor("block_sparse_moe.output_linear.weight"),
    shared_up=Fused("shared_mlp.input_linear"),
    shared_down="shared_mlp.output_linear",
)


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec = granite_spec(fields, served)
    experts = experts_of(fields, spec, softmax_routing(normalised=True), width=None)
    shared = fields.count("shared_intermediate_size", 0, most=MOST_FEATURES)
    if shared:
        experts = replace(experts, shared=shared_of(experts, shared))
    return with_experts(spec, experts)


GRANITE_MOE = Family(
    ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    _spec,
    Names(experts=EXPERTS),
    layouts=(stacked("block_sparse_moe", router="block_sparse_moe.router"),),
)
