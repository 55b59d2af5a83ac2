"""Qwen3.5 (dense text): gated delta nets in most layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.kernels.operations.delta_ops import DeltaShape
from tokenpod.models.errors import ModelError
from tokenpod.models.families.family import Family, each_layer, gated_decoder, with_attention
from tokenpod.models.fields import Fields
from tokenpod.models.gated_delta import GatedDeltaNet
from tokenpod.models.layer_spec import LayerSpec
from tokenpod.models.names import Names
from tokenpod.models.norms import Norm
from tokenpod.models.spec import ModelSpec

_KINDS = {"linear_attention", "full_attention"}


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("hidden_act", "silu")
    bias = fields.flag("attention_bias", False)
    epsilon = fields.real("rms_norm_eps", 1e-6)
    spec = gated_decoder(
        fields.defaulting(max_position_embeddings=32_768),
        served,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        head_dim=256,
        norm=Norm("rms", epsilon, offset=1),
        factor=0.25,
    )
    kinds = _kinds(fields, len(spec.layers))
    net = GatedDeltaNet(_shape(fields), epsilon)
    numbers = iter(kinds)

    def layer(own: LayerSpec) -> LayerSpec:
        return replace(own, mixer=net) if next(numbers) == "linear_attention" else own

    return each_layer(with_attention(spec, output_gate=True), layer)


def _shape(fields: Fields) -> DeltaShape:
    return DeltaShape(
        key_heads=fields.integer("linear_num_key_heads", 16, most=1 << 12),
        value_heads=fields.integer("linear_num_value_heads", 32, most=1 << 12),
        key_dim=fields.integer("linear_key_head_dim", 128, most=1 << 12),
        value_dim=fields.integer("linear_value_head_dim", 128, most=1 << 12),
        width=fields.integer("linear_conv_kernel_dim", 4, most=64),
    )


def _kinds(fields: Fields, layers: int) -> tuple[str, ...]:
    """Of each layer; where a config does not say, every fourth has attention."""
    if "layer_types" not in fields:
        every = fields.integer("full_attention_interval", 4)
        return tuple(
            "linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        )
    kinds = tuple(fields.texts("layer_types"))
    if len(kinds) != layers or not set(kinds) <= _KINDS:
        raise ModelError(
            f"{fields.source}: layer_types must name linear_attention or full_attention for each"
            f" of {layers} layers"
        )
    return kinds


QWEN3_5 = Family(("Qwen3_5ForCausalLM",), _spec, Names(beside=("mtp.", "model.visual.")))
