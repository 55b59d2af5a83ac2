"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and experts."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import every, gate_names, stacked
from tokenpod.models.families.family import Family
from tokenpod.models.families.qwen3_5 import delta_spec, predicting, with_mixtures
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import DeltaNames, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields = fields.defaulting(
        intermediate_size=5632,
        moe_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
    )
    spec = delta_spec(fields, served)
    return with_mixtures(
        fields,
        spec,
        normalised=fields.flag("norm_topk_prob", True),
        layers=every(fields, len(spec.layers)),
    )


QWEN3_NEXT = Family(
    ("Qwen3NextForCausalLM",),
    _spec,
    Names(
        experts=gate_names(shared="shared_expert"),
        delta=DeltaNames(by_heads=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
        # Its configs do not say that there is one.
        predicting=predicting(count=1),
    ),
    layouts=(stacked(), stacked(transposed=True)),
)
