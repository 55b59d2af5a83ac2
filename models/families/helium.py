"""Helium: Llama with neighbours rotated."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(
        fields,
        served,
        qkv_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_dim=128,
        theta=1e5,
        interleaved=True,
    )


HELIUM = Family(("HeliumForCausalLM",), _spec)
