"""MiniMax M2: norms over all heads, heads rotated in part, experts chosen by corrected sigmoids."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.expert_ops import Routing, Score
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import experts_of, stacked, with_experts
from tokenpod.models.families.family import Family, gated_decoder, with_attention
from tokenpod.models.layers.head_steps import NormOver
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, experts_apart


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    # What published configs say besides, of one model.
    fields.only("scoring_func", "sigmoid")
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0)
    if any(kind != 1 for kind in fields.values.get("attn_type_list") or ()):
        raise ModelError(f"{fields.source}: attn_type_list has a layer of another type than 1")
    factor = 1.0
    if "rotary_dim" in fields:
        factor = fields.integer("rotary_dim") / fields.integer("head_dim", 128)
    spec = gated_decoder(fields, served, qk_norm=True, head_dim=128, theta=5e6, factor=factor)
    spec = with_attention(spec, qk_norm_over=NormOver.ALL)
    routing = Routing(1, normalised=True, score=Score.SIGMOID)
    experts = experts_of(fields, spec, routing, width=None)
    return with_experts(spec, replace(experts, correction=True))


MINIMAX_M2 = Family(
    ("MiniMaxM2ForCausalLM",),
    _spec,
    Names(
        experts=experts_apart(
            "block_sparse_moe.gate",
            "block_sparse_moe.experts.{e}",
            "w1",
            "w3",
            "w2",
            correction="block_sparse_moe.e_score_correction_bias",
        )
    ),
    layouts=(stacked(router="mlp.gate", correction="mlp.e_score_correction_bias"),),
)
