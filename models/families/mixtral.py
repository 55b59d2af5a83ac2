"""Mixtral: Mistral whose every feed-forward block is a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.config import DecoderConfig
from tokenpod.models.families.experts import expert_weights, experts_of
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.fields import Fields
from tokenpod.models.weights import Weight


def _config(fields: Fields) -> DecoderConfig:
    config = gated_decoder(fields, windows=_windows)
    experts = experts_of(
        fields,
        intermediate_size=config.intermediate_size,
        normalised=True,
        layers=frozenset(range(config.layers)),
    )
    return replace(config, experts=experts)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One for all layers; unlike Mistral's, absent means none."""
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    return (window,) * layers


def _weights(config: DecoderConfig) -> tuple[Weight, ...]:
    block = "model.layers.{i}.block_sparse_moe"
    return expert_weights(config, block=block, gate="w1", up="w3", down="w2")


MIXTRAL = Family(("MixtralForCausalLM",), config=_config, weights=_weights)
