"""Command R (Cohere 1 and 2): parallel branches, neighbours rotated, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    Family,
    each_layer,
    gated_decoder,
    windows_but_every,
    with_attention,
    without_rope,
)
from tokenpod.models.layers.head_steps import NormOver
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import SAME, Join, LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec


def _cohere(fields: Fields, served: int | None, **more: Any) -> ModelSpec:
    norm = Norm("layer", fields.real("layer_norm_eps", 1e-5))
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields,
        served,
        norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        tied=True,
        theta=5e5,
        interleaved=True,
        **more,
    )
    if fields.flag("use_qk_norm", False):
        spec = with_attention(spec, qk_norm=norm, qk_norm_over=NormOver.HEADS)

    def in_parallel(layer: LayerSpec) -> LayerSpec:
        return replace(layer, norms=Norms(attention_in=norm, mlp_in=SAME), join=Join.PARALLEL)

    scale = fields.real("logit_scale", 0.0625)
    return replace(each_layer(spec, in_parallel), head=replace(spec.head, scale=scale))


def _cohere2(fields: Fields, served: int | None) -> ModelSpec:
    """Layers that see everything do not know where."""
    fields.only("use_qk_norm", False)
    spec = _cohere(fields, served, windows=_windows)
    return without_rope(spec, (i for i, window in enumerate(spec.kv_windows) if window is None))


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=4)


COHERE = Family(("CohereForCausalLM",), _cohere)
COHERE2 = Family(("Cohere2ForCausalLM",), _cohere2)
