"""Mixtral: Mistral whose every feed-forward block is a mixture of experts."""

from __future__ import annotations

from tokenpod.models.families.experts import with_experts
from tokenpod.models.families.family import Family, gated_decoder, some_window
from tokenpod.models.fields import Fields
from tokenpod.models.names import ExpertNames, Names
from tokenpod.models.spec import ModelSpec

_EXPERT = "block_sparse_moe.experts.{e}"


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    """Unlike Mistral's, a window that is absent means none."""
    spec = gated_decoder(fields, served, windows=some_window)
    return with_experts(spec, fields, width=None, normalised=True)


MIXTRAL = Family(
    ("MixtralForCausalLM",),
    _spec,
    Names(
        experts=ExpertNames(
            "block_sparse_moe.gate", f"{_EXPERT}.w1", up=f"{_EXPERT}.w3", down=f"{_EXPERT}.w2"
        )
    ),
)
