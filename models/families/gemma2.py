"""Gemma 2: norms on both sides of each branch, soft caps, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, windows_but_every, with_attention
from tokenpod.models.families.gemma import gemma_decoder, with_prompts
from tokenpod.models.specs.layer_spec import Norms
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec = gemma_decoder(
        fields,
        served,
        norms=lambda norm: Norms(norm, norm, norm, norm),
        windows=_windows,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )
    scale = fields.real("query_pre_attn_scalar", 256.0) ** -0.5
    softcap = fields.optional_real("attn_logit_softcapping", 50.0)
    head = replace(spec.head, softcap=fields.optional_real("final_logit_softcapping", 30.0))
    spec = replace(with_attention(spec, scale=scale, softcap=softcap), head=head)
    return with_prompts(fields, spec)


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """The first layer has it, the second not, and so on, unless `layer_types` says otherwise."""
    return windows_but_every(fields, layers, every=2)


NAMES = Names(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)

GEMMA2 = Family(("Gemma2ForCausalLM",), _spec, NAMES)
