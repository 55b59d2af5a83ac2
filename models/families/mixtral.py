"""Mixtral: Mistral whose every feed-forward block is a mixture of experts."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import experts_of, softmax_routing, stacked, with_experts
from tokenpod.models.families.family import Family, gated_decoder, some_window
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, experts_apart


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    """Unlike Mistral's, a window that is absent means none."""
    spec = gated_decoder(fields, served, windows=some_window)
    routing = softmax_routing(normalised=True)
    return with_experts(spec, experts_of(fields, spec, routing, width=None))


MIXTRAL = Family(
    ("MixtralForCausalLM",),
    _spec,
    Names(
        experts=experts_apart(
            "block_sparse_moe.gate", "block_sparse_moe.experts.{e}", "w1", "w3", "w2"
        )
    ),
    layouts=(stacked(router="mlp.gate"),),
)
