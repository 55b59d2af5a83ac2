"""Granite 4: Granite with state spaces in most layers, mostly without positions.

With a mixture of experts and a shared one, or with dense blocks that have the shared one's names.
"""

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
from tokenpod.models.families.family import Family, each_layer, without_rope
from tokenpod.models.families.granite import granite_spec
from tokenpod.models.families.granite_moe import EXPERTS
from tokenpod.models.families.spaces import mamba_of, spaces_in, with_spaces
from tokenpod.models.specs.layer_spec import Mlp
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields = fields.defaulting(intermediate_size=11_008, max_position_embeddings=2048)
    fields.only("position_embedding_type", "rope", "nope")
    spec = granite_spec(fields, served)
    if fields.text("position_embedding_type", "nope") != "rope":
        spec = without_rope(spec, range(len(spec.layers)))
    shared = fields.integer("shared_intermediate_size", 1024, most=MOST_FEATURES)
    if fields.count("num_local_experts", 8):
        fields = fields.defaulting(num_local_experts=8, num_experts_per_tok=2)
        experts = experts_of(fields, spec, softmax_routing(normalised=True), width=None)
        spec = with_experts(spec, replace(experts, shared=shared_of(experts, shared)))
    else:
        dense = spec.layers[0].mlp
        assert isinstance(dense, Mlp)
        spec = each_layer(spec, lambda layer: replace(layer, mlp=replace(dense, width=shared)))
    space = mamba_of(fields, spec.hidden_size, fields.real("rms_norm_eps", 1e-6))
    return with_spaces(spec, space, spaces_in(fields, "layer_types", len(spec.layers)))


GRANITE_HYBRID = Family(
    ("GraniteMoeHybridForCausalLM",),
    _spec,
    Names(
        up=Fused("shared_mlp.input_linear"),
        down="shared_mlp.output_linear",
        experts=EXPERTS,
    ),
    layouts=(stacked("block_sparse_moe", router="block_sparse_moe.router"),),
)
