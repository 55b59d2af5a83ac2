"""Checkpoints of text and images, whose text alone is served."""

from __future__ import annotations

from typing import Any

from support.checkpoints.golden_kinds.base import SMALL, Kind, rope
from support.checkpoints.golden_kinds.disguises import Config, Tensors

_EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_TOKENS = {"eos_token_id": None, "image_token_index": 90}


def _newer_layout(config: Config, tensors: Tensors) -> None:
    """As transformers has them in memory; it saves them as they are published."""
    del config
    for name in list(tensors):
        new = name.replace("language_model.model.", "model.language_model.")
        new = new.replace("language_model.lm_head", "lm_head")
        part = new.startswith(("vision_tower", "multi_modal"))
        tensors[f"model.{new}" if part else new] = tensors.pop(name)


def _with_text(**text: Any) -> dict[str, Any]:
    return {
        **_TOKENS,
        "vision_config": _EYES,
        "text_config": {**SMALL, **text},
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
    }


_GEMMA = {
    **_with_text(
        model_type="gemma3_text",
        head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "mm_tokens_per_image": 4,
    "boi_token_index": 91,
    "eoi_token_index": 92,
}


def _paligemma(**text: Any) -> dict[str, Any]:
    return {
        **_with_text(head_dim=16, tie_word_embeddings=True, **text),
        "projection_dim": SMALL["hidden_size"],
        "vision_config": {**_EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
    }


#: Whose prompts see themselves: tests of texts alone compare with models that read causally.
PREFIX_KINDS: dict[str, Kind] = {
    "paligemma": Kind("PaliGemmaForConditionalGeneration", _paligemma(model_type="gemma")),
    "paligemma2": Kind(
        "PaliGemmaForConditionalGeneration",
        _paligemma(
            model_type="gemma2",
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
}

KINDS: dict[str, Kind] = {
    "gemma3-images": Kind("Gemma3ForConditionalGeneration", _GEMMA),
    "gemma3-images-newer": Kind("Gemma3ForConditionalGeneration", _GEMMA, disguise=_newer_layout),
    "mistral3": Kind(
        "Mistral3ForConditionalGeneration",
        _with_text(model_type="mistral", head_dim=16, sliding_window=None),
    ),
    "mistral3-newer": Kind(
        "Mistral3ForConditionalGeneration",
        _with_text(model_type="mistral", head_dim=16, sliding_window=None),
        disguise=_newer_layout,
    ),
    "mistral3-ministral3": Kind(
        "Mistral3ForConditionalGeneration",
        _with_text(
            model_type="ministral3",
            head_dim=16,
            **rope("default", original_max_position_embeddings=40, llama_4_scaling_beta=0.1),
        ),
    ),
}
