"""Qwen 3 with mixtures of many small experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.config import DecoderConfig
from tokenpod.models.families.experts import expert_weights, experts_of
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.fields import Fields
from tokenpod.models.weights import Weight


def _config(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    config = gated_decoder(fields, windows=_windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
    experts = experts_of(
        fields,
        intermediate_size=fields.integer("moe_intermediate_size", most=1 << 24),
        normalised=fields.flag("norm_topk_prob", False),
        layers=_sparse_layers(fields, config.layers),
    )
    return replace(config, experts=experts)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One for all layers, if it is used."""
    used = fields.flag("use_sliding_window", False)
    return (fields.integer("sliding_window", 4096) if used else None,) * layers


def _sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Every so many-th layer, but for those that are said to be dense."""
    step = fields.integer("decoder_sparse_step", 1)
    return frozenset(range(step - 1, layers, step)) - fields.indices("mlp_only_layers")


def _weights(config: DecoderConfig) -> tuple[Weight, ...]:
    block = "model.layers.{i}.mlp"
    return expert_weights(config, block=block, gate="gate_proj", up="up_proj", down="down_proj")


QWEN3_MOE = Family(("Qwen3MoeForCausalLM",), config=_config, weights=_weights)
