"""Tiny configs of transformers' causal models: settings that fit most, and exceptions."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

#: Classes whose encoder reads text.
WITH_ENCODER = {
    name
    for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    if name != "EncoderDecoderModel"  # any two classes
    and getattr(transformers, name).config_class().is_encoder_decoder
}

#: By what config classes call the thing; a config gets those that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 40,
    "hidden_size_per_layer_input": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 9,
    "attention_chunk_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "image_size": 32,
    "patch_size": 16,
}

_ALL_HEADS = {"num_key_value_heads": 4}
_LATENT = {**_ALL_HEADS, "head_dim": 8}
#: Where the sizes above can't be together, by class.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": _LATENT,
    "AXK2ForCausalLM": _LATENT,
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "BigBirdForCausalLM": {"attention_type": "original_full"},
    "BitNetForCausalLM": {"num_key_value_heads": 4},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "DeepseekV32ForCausalLM": _LATENT,
    "DogeForCausalLM": {"keep_window_size": 256},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Dots3NoteForCausalLM": _ALL_HEADS,
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, "laurel_rank": 8},
    "Gemma4UnifiedAssistantForCausalLM": {"num_kv_shared_layers": 0},
    "Gemma4AssistantForCausalLM": {"hidden_size_per_layer_input": 0},
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GlmMoeDsaForCausalLM": _LATENT,
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention", "mamba"]},
    "HYV4ForCausalLM": _LATENT,
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LongcatFlashForCausalLM": {**_LATENT, "num_layers": 3, "num_hidden_layers": 6},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16},
    "MiniCPM3ForCausalLM": _ALL_HEADS,
    "PersimmonForCausalLM": _ALL_HEADS,
    "YoutuForCausalLM": _LATENT,
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
#: Configs that ask to be decoders.
DECODERS = {"is_decoder": True}


def tiny_config(found: type[Any]) -> Any:
    """The config of a tiny model of a class. Raises whatever the class's checks do."""
    kind = found.config_class
    settings = _sizes(kind().to_dict(), kind)
    settings |= EXCEPTIONS.get(found.__name__, {})
    if found.__name__ in WITH_ENCODER:
        settings["decoder_start_token_id"] = 2
    elif "is_decoder" in kind().to_dict() and not kind.model_type.startswith("t5"):
        settings |= DECODERS
    return kind(**settings)


def _sizes(defaults: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    known = {*defaults, *getattr(kind, "attribute_map", {})}
    settings = {name: value for name, value in SIZES.items() if name in known}
    types = defaults.get("layer_types")
    if types:  # every type of layer once
        settings["layer_types"] = (sorted(set(types)) * 3)[:3]
    for name, sub in getattr(kind, "sub_configs", {}).items():
        if isinstance(defaults.get(name), dict) and hasattr(sub, "to_dict"):
            settings[name] = _sizes(defaults[name], sub)
    return settings


def class_named(name: str) -> type[Any]:
    """One of transformers' classes."""
    found: type[Any] = getattr(transformers, name)
    return found
