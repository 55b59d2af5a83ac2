"""Ernie 4.5 (dense): Llama whose rotation pairs neighbours."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("use_bias", False)
    return gated_decoder(
        fields,
        served,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        head_dim=128,
        tied=True,
        theta=5e5,
        interleaved=True,
    )


ERNIE4_5 = Family(("Ernie4_5ForCausalLM",), _spec)
