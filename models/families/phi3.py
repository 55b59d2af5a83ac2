"""Phi-3: Llama with fused tensors, and factors for long sequences."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, some_window
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(fields, served, windows=some_window)


PHI3 = Family(
    ("Phi3ForCausalLM",),
    _spec,
    Names(qkv=Fused("self_attn.qkv_proj"), up=Fused("mlp.gate_up_proj")),
)
