"""SmolLM3: Llama, some of whose layers have no positions."""

from __future__ import annotations

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, windows_by_type, without_rope
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        windows=_windows,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tied=True,
        theta=2e6,
    )
    return without_rope(spec, _without(fields, len(spec.layers)))


def _without(fields: Fields, layers: int) -> list[int]:
    """Where `no_rope_layers`, despite its name, has a zero; else every fourth layer."""
    rotates = fields.values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        rotates = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or not set(rotates) <= {0, 1}:
        raise ModelError(
            f"{fields.source}: no_rope_layers must be 0 or 1 for each of {layers} layers"
        )
    return [i for i, turned in enumerate(rotates) if not turned]


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Without `layer_types`, of the layers that have no positions."""
    if not fields.flag("use_sliding_window", False) or "sliding_window" not in fields:
        return (None,) * layers
    window = fields.integer("sliding_window")
    if "layer_types" in fields:
        return windows_by_type(fields, layers, window)
    without = _without(fields, layers)
    return tuple(window if i in without else None for i in range(layers))


SMOLLM3 = Family(("SmolLM3ForCausalLM",), _spec)
