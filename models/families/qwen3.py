"""Qwen 3 (dense): norms on the heads of queries and keys instead of biases."""

from __future__ import annotations

from tokenpod.models.config import DecoderConfig
from tokenpod.models.families.family import Family, gated_decoder, gated_weights
from tokenpod.models.families.qwen2 import qwen_windows
from tokenpod.models.fields import Fields


def _config(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return gated_decoder(
        fields, windows=qwen_windows, qkv_bias=bias, output_bias=bias, qk_norm=True, head_dim=128
    )


QWEN3 = Family(("Qwen3ForCausalLM",), config=_config, weights=gated_weights)
