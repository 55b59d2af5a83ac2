"""BERT and its like: encoders with norms behind the branches, and positions of several kinds.

BERT, RoBERTa and XLM-RoBERTa (learned positions), and MPNet (a bias by distance as well).
"""

from __future__ import annotations

from dataclasses import replace

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import (
    ACTIVATIONS,
    Family,
    model_spec,
    plain_mlp,
    sizes_of,
    with_attention,
)
from tokenpod.models.layers.norms import Norm
from tokenpod.models.layers.positions import DistanceBias
from tokenpod.models.specs.layer_spec import Join, LayerSpec, Norms
from tokenpod.models.specs.spec import Embedding, ModelSpec, Positions
from tokenpod.models.weights.names import Names

NAMES = Names(
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",  # noqa: S106 (no secret)
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{i}.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    attention_out="attention.output.LayerNorm",
    mlp_out="output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    surplus=(".position_ids",),
    beyond=("pooler.", "embeddings.position_ids"),
    beside=("cls.", "lm_head.", "classifier.", "pooler."),
)
MPNET_NAMES = replace(
    NAMES,
    token_types="",
    distance_bias="encoder.relative_attention_bias",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_out="attention.LayerNorm",
)


def _encoder(fields: Fields, offset: int, types: int) -> ModelSpec:
    """`offset`: of the table of positions; `types`: kinds of texts that tokens belong to."""
    fields.only("position_embedding_type", "absolute")
    fields.only("is_decoder", False)
    fields.only("add_cross_attention", False)
    sizes = sizes_of(fields, kv_heads=fields.integer("num_attention_heads", most=1 << 14))
    rows = fields.integer("max_position_embeddings", most=1 << 24)
    if rows <= offset:
        raise ModelError(
            f"{fields.source}: max_position_embeddings is {rows}; the first {offset} are no"
            " positions"
        )
    norm = Norm("layer", fields.real("layer_norm_eps", 1e-12), bias=True)
    activation = fields.choice("hidden_act", ACTIVATIONS, "gelu")
    layer = LayerSpec(
        sizes.attention(None, bias=True),
        plain_mlp(fields.integer("intermediate_size", most=1 << 24), activation, bias=True),
        Norms(attention_out=norm, mlp_out=norm),
        Join.POST_NORM,
    )
    spec = model_spec(
        fields,
        sizes,
        tied=True,
        max_positions=rows - offset,
        layers=(layer,) * sizes.layers,
        norm=None,
        embedding=Embedding(positions=Positions(rows, offset), norm=norm, token_types=types),
    )
    return with_attention(spec, causal=False)


def _bert(fields: Fields, served: int | None) -> ModelSpec:
    return _encoder(fields, 0, fields.integer("type_vocab_size", 2, most=16))


def _roberta(fields: Fields, served: int | None) -> ModelSpec:
    # Position number 0 follows that of padding.
    padding = fields.count("pad_token_id", 1)
    return _encoder(fields, padding + 1, fields.integer("type_vocab_size", 1, most=16))


def _mpnet(fields: Fields, served: int | None) -> ModelSpec:
    spec = _encoder(fields, fields.count("pad_token_id", 1) + 1, 0)
    # transformers' own code knows no other number.
    buckets = fields.one_of("relative_attention_num_buckets", [32], 32)
    return with_attention(spec, distance_bias=DistanceBias(buckets))


BERT = Family(
    ("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    _bert,
    NAMES,
    prefixes=("bert.", ""),
)
ROBERTA = Family(
    (
        *("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification"),
        *("RobertaModel", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
    ),
    _roberta,
    NAMES,
    prefixes=("roberta.", ""),
)
MPNET = Family(
    ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification"),
    _mpnet,
    MPNET_NAMES,
    prefixes=("mpnet.", ""),
)
