"""What golden checkpoints are made with, and the settings that all of them start from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 96
MAX_POSITIONS = 256
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Kind:
    """A golden checkpoint: transformers' classes (`LlamaConfig`, ...) and the config's settings."""

    model: str
    settings: dict[str, Any]
    #: Changes the config and tensors of the checkpoint into those of a family that transformers
    #: does not carry.
    disguise: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] | None = None
    #: Changes transformers' model into that family's.
    patch: Callable[[Any], None] | None = None
    #: Whether the settings are all that there are, without `BASES`.
    whole: bool = False
    #: How far log probabilities in float32 may be from transformers'.
    tolerance: float = TOLERANCE


_TOKENS = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}

_GPT = {**_TOKENS, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": MAX_POSITIONS}

SMALL = {
    **_TOKENS,
    **_SIZES,
    "intermediate_size": 112,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
}
#: Settings of families that name things otherwise, by model class; others get SMALL.
BASES: dict[str, dict[str, Any]] = {
    "Dbrx": {**_TOKENS, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": MAX_POSITIONS},
    "OPT": {**_TOKENS, **_SIZES, "ffn_dim": 112, "max_position_embeddings": MAX_POSITIONS},
    "Falcon": {
        **_TOKENS,
        **_SIZES,
        "ffn_hidden_size": 112,
        "max_position_embeddings": MAX_POSITIONS,
    },
    **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCode", "GPTJ"), _GPT),
    "Mpt": {**_TOKENS, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": MAX_POSITIONS},
    "Mamba2": {
        **_TOKENS,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "max_position_embeddings": MAX_POSITIONS,
    },
    "Gemma3ForConditionalGeneration": {},
    "Mistral3ForConditionalGeneration": {},
    "Bloom": {**_TOKENS, "hidden_size": 64, "n_layer": 3, "n_head": 4},
}

#: Of fields that many families read, values that are nobody's default.
VARIED = {"rms_norm_eps": 1e-2, "hidden_act": "gelu", "tie_word_embeddings": True}

#: The two parts of a config whose types of layers rotate differently.
NEAR_AND_FAR = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    }
}

GEMMA4 = {
    # Attention without a scale: with wide heads rounding would decide.
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 9,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 2.0,
}

LINEAR = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

FACTORS = {"long_factor": [2.0, 3.5, 5.0, 9.0], "short_factor": [1.0, 1.1, 1.3, 1.7]}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Settings of a rotation of this type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}
