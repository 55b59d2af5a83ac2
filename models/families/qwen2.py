"""Qwen 2 and 2.5: Llama with biased queries, keys and values, and windows for upper layers.

MiMo, of Xiaomi, is one that may also have a layer that predicts further tokens.
"""

from __future__ import annotations

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import Fields
from tokenpod.models.families.family import Family, gated_decoder, windows_by_type
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.names import Names, PredictingNames


def _spec(fields: Fields, served: int | None) -> ModelSpec:
    return gated_decoder(fields, served, windows=qwen_windows, qkv_bias=True)


def qwen_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """`layer_types` if given; else layers from `max_window_layers` on have the window."""
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", 4096)
    if "layer_types" not in fields:
        # Zero is a meaning of its own here: every layer has the window.
        first = fields.values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelError(f"{fields.source}: max_window_layers is not a whole number")
        return tuple(window if layer >= first else None for layer in range(layers))
    return windows_by_type(fields, layers, window)


def _mimo_spec(fields: Fields, served: int | None) -> ModelSpec:
    fields.only("attention_bias", True)
    return _spec(fields, served)


QWEN2 = Family(("Qwen2ForCausalLM",), _spec)
MIMO = Family(
    ("MiMoForCausalLM",),
    _mimo_spec,
    Names(
        predicting=PredictingNames(
            at="mtp_layers.0.",
            embedding_norm="token_layernorm",
            feature_norm="hidden_layernorm",
            join="input_proj",
            feature_first=True,
            norm="final_layernorm",
        )
    ),
)
