"""OLMoE: norms over all heads of queries and keys together, and many small experts."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    experts_of,
    gate_names,
    softmax_routing,
    stacked,
    with_experts,
)
from tokenpod.models.families.family import Family, gated_decoder, with_attention
from tokenpod.models.layers.head_steps import NormOver
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    # Unlike others', its norms would come before clipping; no published model clips.
    fields.only("clip_qkv", None)
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields.defaulting(rms_norm_eps=1e-5),
        served,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )
    spec = with_attention(spec, qk_norm_over=NormOver.ALL)
    routing = softmax_routing(normalised=fields.flag("norm_topk_prob", False))
    return with_experts(spec, experts_of(fields, spec, routing, width=None))


OLMOE = Family(("OlmoeForCausalLM",), _spec, Names(experts=gate_names()), layouts=(stacked(),))
