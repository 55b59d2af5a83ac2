"""Gemma 3 (text): Gemma 2 with norms of heads instead of soft caps, and two rotations."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    Family,
    attention_of,
    changed,
    each_layer,
    windows_but_every,
    with_attention,
)
from tokenpod.models.families.gemma import gemma_decoder
from tokenpod.models.families.gemma2 import NAMES
from tokenpod.models.layers.rope import rope_of
from tokenpod.models.specs.layer_spec import LayerSpec, Norms
from tokenpod.models.specs.spec import ModelSpec

#: What the configs of checkpoints with images leave out.
DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    fields = fields.defaulting(**DEFAULTS)
    fields.only("attn_logit_softcapping", None)
    encodes = fields.flag("use_bidirectional_attention", False)
    mutual = "Gemma3ForConditionalGeneration" in fields.texts("architectures")
    spec = gemma_decoder(
        fields,
        served,
        norms=lambda norm: Norms(norm, norm, norm, norm),
        windows=_windows,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        qk_norm=True,
        theta=1e6,
        layer_type="full_attention",
    )
    near = rope_of(
        fields,
        attention_of(spec.layers[0]).head_dim,
        spec.max_positions,
        served=served,
        theta_name="rope_local_base_freq",
        layer_type="sliding_attention",
    )

    def layer(own: LayerSpec) -> LayerSpec:
        window = attention_of(own).window
        if window is None:
            return changed(own, causal=not encodes, mutual=mutual)
        # Of an encoder it is what a token sees on both sides together.
        window = window // 2 + 1 if encodes else window
        return changed(own, positions=near, window=window, causal=not encodes, mutual=mutual)

    scale = fields.real("query_pre_attn_scalar", 256.0) ** -0.5
    head = replace(spec.head, softcap=fields.optional_real("final_logit_softcapping", None))
    return replace(each_layer(with_attention(spec, scale=scale), layer), head=head)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    return windows_but_every(fields, layers, every=6)


GEMMA3 = Family(("Gemma3ForCausalLM",), _spec, NAMES)
