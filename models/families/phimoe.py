"""PhiMoE: layer norms, factors for long texts, and two experts that sparsemixer weighs."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import experts_of, stacked, with_experts
from tokenpod.models.families.family import Family, gated_decoder, some_window
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, experts_apart


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        windows=some_window,
        qkv_bias=bias,
        output_bias=bias,
        norm=Norm("layer", fields.real("rms_norm_eps", 1e-5), bias=True),
        theta=1_000_000.0,
    )
    # What was noise in training is how far from the best an expert may be.
    tolerance = 2 * fields.real("router_jitter_noise", 0.01)
    routing = Routing(2, normalised=False, score=Score.SPARSEMIXER, tolerance=tolerance)
    spec = replace(spec, head=replace(spec.head, bias=fields.flag("lm_head_bias", False)))
    return with_experts(spec, experts_of(fields, spec, routing, width=None))


PHIMOE = Family(
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    _spec,
    Names(
        experts=experts_apart(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{e}", "w1", "w3", "w2"
        )
    ),
    layouts=(stacked(router="mlp.router"),),
)
