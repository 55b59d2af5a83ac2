"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key/value head for all, or one for each."""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, attention_of, with_attention
from tokenpod.models.families.learned import NAMES, learned_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    kv_heads = 1 if fields.flag("multi_query", True) else None
    spec, scale = learned_decoder(fields, "gelu_pytorch_tanh", kv_heads)
    return with_attention(spec, scale=scale)


def _names(spec: ModelSpec) -> Names:
    """One head for all: first all queries, then its key and value; else head by head."""
    attention = attention_of(spec.layers[0])
    by_heads = attention.kv_heads == attention.heads
    return replace(NAMES, qkv=Fused("attn.c_attn", by_heads=by_heads))


GPT_BIGCODE = Family(("GPTBigCodeForCausalLM",), _spec, _names, prefixes=("transformer.", ""))
