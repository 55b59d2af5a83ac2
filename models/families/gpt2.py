"""GPT-2: products whose weights are stored the other way round, and perhaps a scale by layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, changed, each_layer, with_attention
from tokenpod.models.families.learned import NAMES, learned_decoder
from tokenpod.models.specs.spec import ModelSpec


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    spec, scale = learned_decoder(fields, "gelu_new")
    if not fields.flag("scale_attn_by_inverse_layer_idx", False):
        return with_attention(spec, scale=scale)
    number = count(1)
    return each_layer(spec, lambda layer: changed(layer, scale=scale / next(number)))


GPT2 = Family(
    ("GPT2LMHeadModel",), _spec, replace(NAMES, transposed=True), prefixes=("transformer.", "")
)
