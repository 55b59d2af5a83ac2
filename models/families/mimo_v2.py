"""MiMo V2 Flash: values shorter than keys, windows with sinks in most layers, and experts."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.experts import (
    experts_of,
    gate_names,
    sigmoid_routing,
    sparse_layers,
    with_experts,
)
from tokenpod.models.families.family import (
    Family,
    attention_of,
    changed,
    gated_decoder,
    windows_by_type,
)
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names

#: Which part of a head is rotated, if a config does not say.
_ROTATED = 0.334


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    for name, value in (
        ("hidden_act", "silu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
    ):
        fields.only(name, value)
    fields.only("n_shared_experts", 0)
    fields = fields.defaulting(
        rms_norm_eps=fields.real("layernorm_epsilon", 1e-5), num_attention_heads=64
    )
    spec = gated_decoder(
        fields,
        served,
        windows=_windows,
        qkv_bias=fields.flag("attention_bias", False),
        head_dim=192,
        theta=5e6,
        factor=_ROTATED,
        layer_type="full_attention",
    )
    own = attention_of(spec.layers[0])
    value_dim = fields.integer("v_head_dim", 128, most=1 << 12)
    # Layers with windows have more key/value heads of the same size.
    for name, size in (("num_attention_heads", own.heads), ("head_dim", own.head_dim)):
        fields.only(f"swa_{name}", size)
    fields.only("swa_v_head_dim", value_dim)
    windowed = {
        "kv_heads": fields.integer("swa_num_key_value_heads", 2 * own.kv_heads, most=own.heads),
        "sinks": True,
        "positions": rope_of(
            fields,
            own.head_dim,
            spec.max_positions,
            served=served,
            theta=1e4,
            theta_name="swa_rope_theta",
            factor=_ROTATED,
            layer_type="sliding_attention",
        ),
    }
    scale = fields.optional_real("attention_value_scale", 0.707) or 1.0

    def layer(each: LayerSpec) -> LayerSpec:
        more = {} if attention_of(each).window is None else windowed
        return changed(each, own_value_dim=value_dim, output_scale=scale, **more)

    spec = replace(spec, layers=tuple(map(layer, spec.layers)))
    experts = experts_of(
        fields, spec, sigmoid_routing(fields), count=("n_routed_experts", "num_local_experts")
    )
    return with_experts(spec, replace(experts, correction=True), _sparse(fields, len(spec.layers)))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """By published patterns, by `layer_types`, or all layers but the first and every sixth."""
    window = fields.integer("sliding_window", 129)
    if "sliding_window_size" in fields:
        # That is how many positions are seen before a token's own.
        window = fields.integer("sliding_window_size") + 1
    # Says the window once more.
    fields.only("attention_chunk_size", window, window - 1)
    pattern = [int(i > 0 and (i + 1) % 6 > 0) for i in range(layers)]
    if "hybrid_layer_pattern" in fields:
        pattern = [*fields.counts("hybrid_layer_pattern", layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
    return windows_by_type(fields.defaulting(layer_types=kinds), layers, window)


def _sparse(fields: Fields, layers: int) -> frozenset[int]:
    """Which layers have experts; without a word of it, all but the first."""
    if isinstance(fields.values.get("moe_layer_freq"), list):
        each = fields.counts("moe_layer_freq", layers)
        return frozenset(i for i, sparse in enumerate(each) if sparse)
    return frozenset(sparse_layers(fields, layers, dense=1))


MIMO_V2 = Family(
    ("MiMoV2FlashForCausalLM",),
    _spec,
    Names(
        sinks="self_attn.attention_sink_bias",
        experts=gate_names(),
        # Layers that predict further tokens.
        beyond=("mtp.",),
    ),
)
