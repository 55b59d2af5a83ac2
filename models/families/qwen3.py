"""Qwen 3 (dense): norms on the heads of queries and keys instead of biases."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.families.qwen2 import qwen_windows
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields,
        served,
        windows=qwen_windows,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
    )


QWEN3 = Family(("Qwen3ForCausalLM",), _spec)
