"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from tokenpod.models.config import DecoderConfig
from tokenpod.models.families.family import Family, gated_decoder, gated_weights
from tokenpod.models.fields import Fields


def _config(fields: Fields) -> DecoderConfig:
    return gated_decoder(fields, windows=_windows)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Absent means 4,096, as in the first release; null means none."""
    window = fields.values.get("sliding_window", 4096)
    return (None if window is None else fields.integer("sliding_window", 4096),) * layers


MISTRAL = Family(("MistralForCausalLM",), config=_config, weights=gated_weights)
