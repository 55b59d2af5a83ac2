"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.fields import Fields
from tokenpod.models.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(fields, served, windows=_windows)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Absent means 4,096, as in the first release; null means none."""
    return (fields.optional_integer("sliding_window", 4096),) * layers


MISTRAL = Family(("MistralForCausalLM",), _spec)
