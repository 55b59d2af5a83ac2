"""Checkpoints that also see or hear, by every name that is served as text: with all their parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from support.checkpoints.golden_kinds.base import SMALL, Kind
from support.checkpoints.golden_kinds.disguises import Config, Tensors

_TEXT = {**SMALL, "head_dim": 16, "num_hidden_layers": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_MULTIMODAL = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {**_MULTIMODAL, "mrope_interleaved": True}
_LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        **_INTERLEAVED,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
    },
}
_GLM = {
    "rope_parameters": {
        **_MULTIMODAL,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    }
}
_DEEPSEEK = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
_GLM_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}

#: A tower of each kind.
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_QWEN2_EYES = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1}
_QWEN2_5_EYES = {
    **_QWEN_EYES,
    "fullatt_block_indexes": [0],
}
_GLM_EYES = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "image_size": 28,
}
_KIMI_EYES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "projection_hidden_size": 32,
}
_LLAMA4_EYES = {
    **_SIGLIP,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_EARS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 8,
}
#: Tokens in the places of images: none that the tests have, since transformers takes them out.
_IDS = dict.fromkeys(
    (
        *("image_token_id", "video_token_id", "image_token_index", "vision_start_token_id"),
        *("vision_end_token_id", "audio_token_id", "audio_token_index"),
    ),
    1000,
)


def _kimi_layout(config: Config, tensors: Tensors) -> None:
    """As published: what transformers saves is called otherwise than what it loads."""
    del config
    for name in [name for name in tensors if name.startswith("language_model.model.blocks.")]:
        tensors[name.replace(".blocks.", ".layers.")] = tensors.pop(name)


def _flat(config: Config, tensors: Tensors) -> None:
    """As files are that are older than `text_config`."""
    del tensors
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    rope["type"] = "mrope"
    del rope["rope_type"]
    for name in ("model_type", "architectures"):
        text.pop(name, None)
    config |= {**text, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


def _chat_model(config: Config, tensors: Tensors) -> None:
    """As InternVL's own project publishes it."""
    config |= {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    config["llm_config"] = config.pop("text_config")
    for name in list(tensors):
        new = name.replace("vision_tower.", "vision_model.").replace("multi_modal_proj", "mlp1")
        tensors[new] = tensors.pop(name)


def _spoken(config: Config, tensors: Tensors) -> None:
    """A thinker beside what speaks."""
    thinker = dict(config)
    config.clear()
    config["architectures"] = [thinker["architectures"][0].replace("Thinker", "")]
    config["thinker_config"] = thinker
    for name in list(tensors):
        tensors[f"thinker.{name}"] = tensors.pop(name)
    tensors["talker.model.norm.weight"] = torch.ones(2)


def _kind(name: str, text: dict[str, Any], eyes: dict[str, Any], **whole: Any) -> Kind:
    """Settings of a whole config; ids of tokens are those that its class has."""
    settings = {"vision_config": eyes, "text_config": {**_TEXT, **text}, **_IDS, **whole}
    settings = {name: value for name, value in settings.items() if value != {}}
    return Kind(f"{name}ForConditionalGeneration", settings, whole=True)


def _kinds() -> Iterator[tuple[str, Kind]]:
    llama = {"model_type": "llama"}
    qwen2 = {"model_type": "qwen2"}
    qwen3 = {"model_type": "qwen3"}
    untied = {"tie_word_embeddings": False}
    # transformers leaves the scale of logits out here.
    yield (
        "cohere2-vision",
        _kind(
            "Cohere2Vision",
            {"model_type": "cohere2", "logit_scale": 1.0},
            _SIGLIP,
            alignment_intermediate_size=32,
        ),
    )
    yield (
        "aya-vision",
        _kind(
            "AyaVision",
            {"model_type": "cohere2", "logit_scale": 1.0},
            {"model_type": "siglip_vision_model", **_SIGLIP},
            adapter_intermediate_size=64,
        ),
    )
    yield "exaone4.5", _kind("Exaone4_5_", {"model_type": "exaone4"}, _QWEN2_5_EYES, **untied)
    yield (
        "gemma4-images",
        _kind(
            "Gemma4",
            {
                "head_dim": 8,
                "global_head_dim": 16,
                "sliding_window": 9,
                "vocab_size_per_layer_input": 96,
                "hidden_size_per_layer_input": 16,
                "num_kv_shared_layers": 0,
                "pad_token_id": 0,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            _SIGLIP,
            audio_config=_EARS,
        ),
    )
    yield "glm4v", _kind("Glm4v", _GLM, _GLM_EYES, **untied)
    yield "glm4.6v", _kind("Glm46V", {**_GLM, "model_type": "glm4v_text"}, _GLM_EYES, **untied)
    yield "glm4v-moe", _kind("Glm4vMoe", {**_GLM, **_GLM_EXPERTS}, _GLM_EYES, **untied)
    yield (
        "got-ocr2",
        _kind(
            "GotOcr2",
            qwen2,
            {**_SIGLIP, "output_channels": 32, "mlp_dim": 32, "global_attn_indexes": []},
            **untied,
        ),
    )
    yield "glm-asr", _kind("GlmAsr", llama, {}, audio_config=_EARS)
    yield "idefics3", _kind("Idefics3", llama, _SIGLIP, **untied)
    yield "internvl", _kind("InternVL", qwen2, _INTERN_EYES, **untied)
    yield "internvl-qwen3", _kind("InternVL", qwen3, _INTERN_EYES, **untied)
    yield (
        "internvl-chat",
        replace(_kind("InternVL", qwen3, _INTERN_EYES, **untied), disguise=_chat_model),
    )
    yield (
        "kimi-k2.5",
        replace(_kind("Kimi_K25", _DEEPSEEK, _KIMI_EYES, **untied), disguise=_kimi_layout),
    )
    yield (
        "lfm2-vl",
        _kind("Lfm2Vl", {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, _SIGLIP),
    )
    yield (
        "llama4-images",
        _kind(
            "Llama4",
            {
                "intermediate_size_mlp": 96,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "moe_layers": [1],
                "no_rope_layers": [1, 0],
                "attention_chunk_size": 16,
            },
            _LLAMA4_EYES,
            **untied,
        ),
    )
    yield (
        "lighton-ocr",
        _kind("LightOnOcr", qwen3, {"model_type": "pixtral", **_SIGLIP, "head_dim": 16}),
    )
    yield "llava", _kind("Llava", llama, {"model_type": "clip_vision_model", **_SIGLIP}, **untied)
    yield (
        "llava-next",
        _kind(
            "LlavaNext",
            {"model_type": "mistral"},
            {"model_type": "clip_vision_model", **_SIGLIP},
            **untied,
        ),
    )
    yield (
        "llava-onevision",
        _kind("LlavaOnevision", qwen2, {"model_type": "siglip_vision_model", **_SIGLIP}, **untied),
    )
    yield (
        "minicpm-v4.6",
        _kind("MiniCPMV4_6", {"model_type": "qwen3_5_text", **_LINEAR}, _SIGLIP, **untied),
    )
    yield (
        "ovis2",
        _kind("Ovis2", qwen2, {**_SIGLIP, "vocab_size": 8, "num_visual_indicator_tokens": 2}),
    )
    yield "qwen2-audio", _kind("Qwen2Audio", qwen2, {}, audio_config=_WHISPER)
    yield "qwen2-vl", _kind("Qwen2VL", {"rope_parameters": _MULTIMODAL}, _QWEN2_EYES)
    yield "qwen2.5-vl", _kind("Qwen2_5_VL", {"rope_parameters": _MULTIMODAL}, _QWEN2_5_EYES)
    yield (
        "qwen2.5-vl-flat",
        replace(
            _kind("Qwen2_5_VL", {"rope_parameters": _MULTIMODAL}, _QWEN2_5_EYES), disguise=_flat
        ),
    )
    yield (
        "qwen2.5-omni",
        replace(
            _kind(
                "Qwen2_5OmniThinker",
                {"rope_parameters": _MULTIMODAL},
                _QWEN2_5_EYES,
                audio_config={**_WHISPER, "output_dim": 64, "n_window": 4},
            ),
            disguise=_spoken,
        ),
    )
    yield (
        "qwen3-omni-moe",
        replace(
            _kind(
                "Qwen3OmniMoeThinker",
                {"rope_parameters": _INTERLEAVED, **_EXPERTS},
                _QWEN_EYES,
                audio_config={**_WHISPER, "output_dim": 64, "downsample_hidden_size": 8},
            ),
            disguise=_spoken,
        ),
    )
    yield "qwen3-vl", _kind("Qwen3VL", {"rope_parameters": _INTERLEAVED}, _QWEN_EYES)
    yield (
        "qwen3-vl-moe",
        _kind("Qwen3VLMoe", {"rope_parameters": _INTERLEAVED, **_EXPERTS}, _QWEN_EYES),
    )
    yield "qwen3.5", _kind("Qwen3_5", _LINEAR, _QWEN_EYES)
    yield (
        "qwen3.5-moe",
        _kind(
            "Qwen3_5Moe",
            {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 40},
            _QWEN_EYES,
        ),
    )
    yield (
        "qwen3-asr",
        _kind(
            "Qwen3ASR",
            qwen3,
            {},
            audio_config={**_WHISPER, "output_dim": 64, "downsample_hidden_size": 8},
        ),
    )
    yield "smolvlm", _kind("SmolVLM", llama, _SIGLIP, **untied)
    yield "video-llama3", _kind("VideoLlama3", qwen2, _SIGLIP, **untied)
    yield (
        "vip-llava",
        _kind(
            "VipLlava",
            llama,
            {"model_type": "clip_vision_model", **_SIGLIP},
            vision_feature_layers=[0, 1],
            **untied,
        ),
    )
    yield "voxtral", _kind("Voxtral", llama, {}, audio_config=_EARS)


_INTERN_EYES = {**_SIGLIP, "image_size": [16, 16], "patch_size": [8, 8]}
NESTED_KINDS: dict[str, Kind] = dict(_kinds())
