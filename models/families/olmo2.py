"""OLMo 2 and 3: norms behind the branches, and of all queries and all keys together."""

from __future__ import annotations

from typing import Any

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    NAMES_BEHIND,
    Family,
    attention_of,
    changed,
    each_layer,
    gated_decoder,
    norms_behind,
    windows_but_every,
    with_attention,
)
from tokenpod.models.layers.head_steps import NormOver
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec
from tokenpod.models.specs.spec import ModelSpec


def _olmo2(fields: Fields, served: int | None, **more: Any) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(fields, served, qkv_bias=bias, output_bias=bias, qk_norm=True, **more)
    return norms_behind(with_attention(spec, qk_norm_over=NormOver.ALL))


def _olmo3(fields: Fields, served: int | None) -> ModelSpec:
    """Layers with a window have a rotation that is not stretched."""
    kinds = ("full_attention", "sliding_attention")
    spec = _olmo2(fields, served, windows=_windows, theta=5e5, layer_type=kinds[0])
    near = rope_of(
        fields,
        attention_of(spec.layers[0]).head_dim,
        spec.max_positions,
        served=served,
        theta=5e5,
        layer_type=kinds[1],
    )

    def layer(own: LayerSpec) -> LayerSpec:
        if attention_of(own).window is None:
            return own
        return changed(own, positions=near)

    return each_layer(spec, layer)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=4)


OLMO2 = Family(("Olmo2ForCausalLM",), _olmo2, NAMES_BEHIND)
OLMO3 = Family(("Olmo3ForCausalLM",), _olmo3, NAMES_BEHIND)
