"""Gemma 1: Llama with norms around one, a scaled embedding, and heads of a size of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    Family,
    attention_of,
    changed,
    each_layer,
    gated_decoder,
    with_attention,
)
from tokenpod.models.layers.norms import Norm
from tokenpod.models.specs.layer_spec import LayerSpec, Mlp, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec


def gemma_decoder(
    fields: Fields, served: int | None, *, norms: Callable[[Norm], Norms], **more: Any
) -> ModelSpec:
    """What all Gemmas have: weights of norms count from one, and the embedding is scaled."""
    bias = fields.flag("attention_bias", False)
    spec = gated_decoder(
        fields, served, qkv_bias=bias, output_bias=bias, head_dim=256, tied=True, **more
    )
    assert spec.norm is not None
    norm = replace(spec.norm, offset=1)
    own = norms(norm)

    def layer(layer: LayerSpec) -> LayerSpec:
        qk_norm = attention_of(layer).qk_norm and norm
        return replace(changed(layer, qk_norm=qk_norm), norms=own)

    embedding = Embedding(scale=spec.hidden_size**0.5, scales_given=False)
    return replace(each_layer(spec, layer), norm=norm, embedding=embedding)


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    name = fields.first("hidden_activation", "hidden_act")
    spec = gemma_decoder(
        fields,
        served,
        norms=lambda norm: Norms(attention_in=norm, mlp_in=norm),
        activation=(name, "gelu_pytorch_tanh"),
    )
    return with_prompts(fields, each_layer(spec, _with_the_approximation))


def with_prompts(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """What the text of PaliGemma sees: all of a prompt, which config.json may leave unsaid."""
    if "PaliGemmaForConditionalGeneration" not in fields.texts("architectures"):
        fields.only("use_bidirectional_attention", False)
        return spec
    fields.only("use_bidirectional_attention", True)
    return with_attention(spec, mutual=True, mutual_prompts=True)


def _with_the_approximation(layer: LayerSpec) -> LayerSpec:
    """The first release says "gelu", and means the approximation that it was trained with."""
    assert isinstance(layer.mlp, Mlp)
    if layer.mlp.activation is not Activation.GELU:
        return layer
    return replace(layer, mlp=replace(layer.mlp, activation=Activation.GELU_TANH))


GEMMA = Family(("GemmaForCausalLM",), _spec)
