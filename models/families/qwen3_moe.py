"""Qwen 3 with mixtures of many small experts, in all layers or in some."""

from __future__ import annotations

from tokenpod.models.families.experts import with_experts
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.fields import Fields
from tokenpod.models.names import ExpertNames, Names
from tokenpod.models.spec import ModelSpec

_EXPERT = "mlp.experts.{e}"


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields, served, windows=_windows, qkv_bias=bias, output_bias=bias, qk_norm=True
    )
    return with_experts(
        spec,
        fields,
        width=fields.integer("moe_intermediate_size", most=1 << 24),
        normalised=fields.flag("norm_topk_prob", False),
        layers=_sparse_layers(fields, len(spec.layers)),
    )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """One for all layers, if it is used."""
    used = fields.flag("use_sliding_window", False)
    return (fields.integer("sliding_window", 4096) if used else None,) * layers


def _sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Every so many-th layer, but for those that are said to be dense."""
    step = fields.integer("decoder_sparse_step", 1)
    return frozenset(range(step - 1, layers, step)) - fields.indices("mlp_only_layers")


QWEN3_MOE = Family(
    ("Qwen3MoeForCausalLM",),
    _spec,
    Names(
        experts=ExpertNames(
            "mlp.gate",
            f"{_EXPERT}.gate_proj",
            up=f"{_EXPERT}.up_proj",
            down=f"{_EXPERT}.down_proj",
        )
    ),
)
