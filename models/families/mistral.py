"""Mistral: Llama with one sliding window for all layers; Ministral, where layers differ."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, windows_by_type, with_attention
from tokenpod.models.layers.head_steps import QueryGrowth
from tokenpod.models.layers.rope import rope_parameters
from tokenpod.models.specs.spec import ModelSpec


def _mistral(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(fields, served, windows=_windows)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Absent means 4,096, as in the first release; null means none."""
    return (fields.optional_integer("sliding_window", 4096),) * layers


def _ministral(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(fields, served, windows=_windows_by_type)


def _windows_by_type(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if "layer_types" not in fields:
        return _windows(fields, layers)
    return windows_by_type(fields, layers, fields.optional_integer("sliding_window", 4096))


def _ministral3(fields: Fields, served: int | None) -> ModelSpec:
    """Queries far from the beginning are longer, as in Llama 4."""
    windows = (fields.optional_integer("sliding_window", None),)
    spec = gated_decoder(
        fields,
        served,
        windows=lambda fields, layers: windows * layers,
        head_dim=128,
    )
    rope = rope_parameters(fields)
    if "llama_4_scaling_beta" not in rope:
        return spec
    length = rope.integer("original_max_position_embeddings")
    growth = QueryGrowth(rope.real("llama_4_scaling_beta"), length)
    return with_attention(spec, query_growth=growth)


MISTRAL = Family(("MistralForCausalLM",), _mistral)
MINISTRAL = Family(("MinistralForCausalLM",), _ministral)
MINISTRAL3 = Family(("Ministral3ForCausalLM",), _ministral3)
