"""InternLM 2 and 3: Llama under other names; 2 has queries, keys and values in one tensor."""

from __future__ import annotations

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Fused, Names


def _internlm2(fields: Fields, served: int | None) -> ModelSpec:
    bias = fields.flag("bias", False)
    return gated_decoder(fields, served, qkv_bias=bias, output_bias=bias)


def _internlm3(fields: Fields, served: int | None) -> ModelSpec:
    """`bias` is that of all products but queries, keys and values."""
    bias = fields.flag(fields.first("bias", "mlp_bias"), False)
    return gated_decoder(
        fields,
        served,
        qkv_bias=fields.flag(fields.first("qkv_bias", "attention_bias"), False),
        output_bias=bias,
        mlp_bias=bias,
    )


INTERNLM2 = Family(
    ("InternLM2ForCausalLM",),
    _internlm2,
    Names(
        embedding="tok_embeddings",
        head="output",
        qkv=Fused("attention.wqkv", by_heads=True),
        output="attention.wo",
        attention_in="attention_norm",
        mlp_in="ffn_norm",
        up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
    ),
)
INTERNLM3 = Family(("InternLM3ForCausalLM",), _internlm3)
