"""Baichuan 1 and 2: Llama with one tensor for queries, keys and values; 13B has ALiBi."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.alibi import alibi_of
from tokenpod.models.families.family import Family, attention_of, gated_decoder, with_attention
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names

#: Baichuan 2's, whose head has rows of length one. No field says so.
SECOND_VOCABULARY = 125_696


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    """Only models with rotation, those of 7B, say `max_position_embeddings`."""
    sloped = "max_position_embeddings" not in fields
    if sloped:
        length = fields.integer("model_max_length", 4096)
        fields = fields.defaulting(max_position_embeddings=length)
    spec = gated_decoder(fields, served)
    if sloped:
        spec = with_attention(spec, positions=alibi_of(attention_of(spec.layers[0]).heads))
    normalised = spec.vocab_size == SECOND_VOCABULARY
    return replace(spec, head=replace(spec.head, normalised=normalised))


BAICHUAN = Family(
    ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
    _spec,
    Names(qkv=Fused("self_attn.W_pack")),
)
