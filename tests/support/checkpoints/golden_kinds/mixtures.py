"""Checkpoints of families with experts, in every layout that they are published in."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from support.checkpoints.golden_kinds.base import LINEAR, MAX_POSITIONS, Kind, rope

Tensors = dict[str, torch.Tensor]


def renamed(*pairs: tuple[str, str]) -> Callable[[dict[str, Any], Tensors], None]:
    """A checkpoint whose names match these patterns otherwise."""

    def disguise(config: dict[str, Any], tensors: Tensors) -> None:
        del config
        for name in list(tensors):
            new = name
            for pattern, replacement in pairs:
                new = re.sub(pattern, replacement, new)
            tensors[new] = tensors.pop(name)

    return disguise


def stacked(
    gate: str, up: str, down: str, *pairs: tuple[str, str]
) -> Callable[[dict[str, Any], Tensors], None]:
    """Experts apart become two tensors a layer, [experts, out, in], and other names as `pairs`."""

    def disguise(config: dict[str, Any], tensors: Tensors) -> None:
        layers = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
        for layer in layers:
            parts: dict[str, list[torch.Tensor]] = {}
            for part in (gate, up, down):
                names = [
                    n for n in tensors if re.fullmatch(rf"{layer}\.experts\.\d+\.{part}\.weight", n)
                ]
                names.sort(key=lambda n: int(n.split(".experts.")[1].split(".")[0]))
                parts[part] = [tensors.pop(name) for name in names]
            both = [torch.cat(pair) for pair in zip(parts[gate], parts[up], strict=True)]
            tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
            tensors[f"{layer}.experts.down_proj"] = torch.stack(parts[down])
        renamed(*pairs)(config, tensors)

    return disguise


def four_bits(name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales for experts' weights [experts, in, out] of this name."""
    experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(len(name) + int(name.split(".")[2]))
    blocks = (experts, outputs, inputs // 32, 16)
    return (
        torch.randint(256, blocks, generator=generator, dtype=torch.uint8),
        torch.randint(120, 125, blocks[:3], generator=generator, dtype=torch.uint8),
    )


def packed(config: dict[str, Any], tensors: Tensors) -> None:
    """Experts' weights in MXFP4, as gpt-oss is published."""
    config["quantization_config"] = {"quant_method": "mxfp4"}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = four_bits(name, tensors.pop(name).shape)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales


def unpacked(model: Any) -> None:
    """The same weights, made by transformers' own function."""
    # It takes seconds to import, and each process that runs tests imports this module.
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            made = _convert_moe_packed_tensors(
                *four_bits(name, parameter.shape), dtype=torch.float32
            )
            parameter.data = made


QWEN_STACKED = stacked("gate_proj", "up_proj", "down_proj")
#: What any family reads, as its first checkpoint does not have it.
VARIED = {
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
    "num_experts_per_tok": 3,
}
SIZES = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
QWEN2 = {**SIZES, "num_experts": 6, "shared_expert_intermediate_size": 40}
GLM = {
    **SIZES,
    "n_routed_experts": 8,
    "head_dim": 24,
    "attention_bias": True,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.8,
}
ERNIE = {
    "moe_intermediate_size": 24,
    "moe_k": 3,
    "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
    "pad_token_id": None,
}
OLMOE = {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}
GRANITE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
}
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "intermediate_size": 64,
}

#: Chunks of the walk are absorbed, unless dimensions are others.
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-3,
}
#: Expanded from 13 tokens on.
KIMI = {
    **DEEPSEEK,
    "num_key_value_heads": 8,
    "num_attention_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
}
YARN = rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.707,
    mscale_all_dim=1.1,
)


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The same but for one."""
    return {key: value for key, value in settings.items() if key != name}


#: Gated delta nets: an epsilon of the size of what heads read, as in `gated`.
DELTA = {**LINEAR, **QWEN2, "rms_norm_eps": 1e-1}
DELTA_VARIED = {
    **VARIED,
    **DELTA,
    **rope("default", partial_rotary_factor=0.5),
    "hidden_act": "silu",
    "attention_bias": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 8e-2,
    "num_experts_per_tok": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
}

_LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
_GRANITE4 = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "shared_intermediate_size": 72,
    "rms_norm_eps": 1e-2,
}

_KIMI_LINEAR = {
    "num_key_value_heads": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-1,
}


def as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Kimi Linear: delta nets in an object of the config, dense blocks under a name of theirs."""
    kinds = enumerate(config.pop("layer_types"), start=1)
    nets = {i for i, kind in kinds if kind == "linear_attention"}
    config["linear_attn_config"] = {
        "kda_layers": sorted(nets),
        "full_attn_layers": sorted({*range(1, config["num_hidden_layers"] + 1)} - nets),
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    renamed((r"block_sparse_moe\.(gate|up|down)_proj", r"mlp.\1_proj"))(config, tensors)


_MIMO_V2 = {
    "head_dim": 24,
    "v_head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rms_norm_eps": 1e-2,
}


def mimo_as_published(config: dict[str, Any], tensors: Tensors) -> None:
    """Names of fields as in published configs, and a layer that predicts further tokens."""
    kinds, blocks = config.pop("layer_types"), config.pop("mlp_layer_types")
    config["hybrid_layer_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    config["moe_layer_freq"] = [int(block == "sparse") for block in blocks]
    config["sliding_window_size"] = config["sliding_window"] - 1
    config["layernorm_epsilon"] = config.pop("rms_norm_eps")
    ropes = config.pop("rope_parameters")
    config["rope_theta"] = ropes["full_attention"]["rope_theta"]
    config["swa_rope_theta"] = ropes["sliding_attention"]["rope_theta"]
    config["partial_rotary_factor"] = ropes["full_attention"]["partial_rotary_factor"]
    tensors["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(2, 2)


KINDS: dict[str, Kind] = {
    "mimo-v2": Kind("MiMoV2Flash", _MIMO_V2),
    "mimo-v2-published": Kind(
        "MiMoV2Flash",
        {
            **_MIMO_V2,
            "head_dim": 16,
            "v_head_dim": 24,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "attention_value_scale": None,
            "sliding_window": 7,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e3))
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
        mimo_as_published,
    ),
    "kimi-linear": Kind("KimiLinear", _KIMI_LINEAR),
    "kimi-linear-published": Kind(
        "KimiLinear",
        {
            **_KIMI_LINEAR,
            "num_shared_experts": 2,
            "num_expert_group": 3,
            "topk_group": 2,
            "moe_renormalize": False,
            "q_lora_rank": 12,
            "linear_head_dim": 12,
            "linear_num_heads": 8,
            "linear_conv_kernel_dim": 3,
            "kv_lora_rank": 32,
            "rms_norm_eps": 5e-2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
        as_published,
    ),
    "qwen3-next": Kind("Qwen3Next", DELTA),
    "qwen3-next-varied": Kind(
        "Qwen3Next",
        {
            **DELTA_VARIED,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
        QWEN_STACKED,
    ),
    "lfm2-moe": Kind("Lfm2Moe", _LFM2),
    "lfm2-moe-stacked": Kind(
        "Lfm2Moe",
        {
            **_LFM2,
            **rope("linear", factor=3.0),
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "use_expert_bias": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-2,
            "tie_word_embeddings": False,
        },
        stacked("w1", "w3", "w2"),
    ),
    "granite4-moe": Kind("GraniteMoeHybrid", _GRANITE4),
    "qwen3-5-moe": Kind("Qwen3_5Moe", DELTA),
    "qwen3-5-moe-varied": Kind("Qwen3_5Moe", DELTA_VARIED, QWEN_STACKED),
    "mixtral-stacked": Kind(
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        stacked("w1", "w3", "w2", (r"block_sparse_moe", "mlp")),
    ),
    "qwen3-moe-stacked": Kind("Qwen3Moe", {**SIZES, "num_experts": 6}, QWEN_STACKED),
    "qwen2-moe": Kind("Qwen2Moe", {**QWEN2, "norm_topk_prob": True, "qkv_bias": False}),
    "qwen2-moe-stacked": Kind(
        "Qwen2Moe",
        {
            **QWEN2,
            **VARIED,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
        QWEN_STACKED,
    ),
    "glm4-moe": Kind("Glm4Moe", {**GLM, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
    "glm4-moe-stacked": Kind(
        "Glm4Moe",
        {
            **SIZES,
            **VARIED,
            "n_routed_experts": 4,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "partial_rotary_factor": 0.75,
        },
        QWEN_STACKED,
    ),
    "ernie4-5-moe": Kind("Ernie4_5_Moe", {**ERNIE, "use_bias": True}),
    "ernie4-5-moe-stacked": Kind(
        "Ernie4_5_Moe",
        {
            **ERNIE,
            **VARIED,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
            "moe_norm_min": 0.9,
        },
        stacked("gate_proj", "up_proj", "down_proj", (r"mlp\.moe_statics", "mlp.gate.moe_statics")),
    ),
    "olmoe": Kind("Olmoe", OLMOE),
    "olmoe-stacked": Kind(
        "Olmoe",
        {
            **OLMOE,
            **VARIED,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
        QWEN_STACKED,
    ),
    "phimoe": Kind("Phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.3}),
    "phimoe-stacked": Kind(
        "Phimoe",
        {
            **VARIED,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "router_jitter_noise": 0.5,
            "sliding_window": 17,
            "attention_bias": True,
            "lm_head_bias": True,
            "max_position_embeddings": 4 * MAX_POSITIONS,
            "original_max_position_embeddings": MAX_POSITIONS,
            **rope(
                "longrope",
                original_max_position_embeddings=MAX_POSITIONS,
                long_factor=[1.0] * 8,
                short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 2.1, 2.5, 3.0],
                short_mscale=1.2,
                long_mscale=1.4,
            ),
        },
        stacked(
            "w1", "w3", "w2", (r"block_sparse_moe\.gate", "mlp.router"), ("block_sparse_moe", "mlp")
        ),
    ),
    "granite-moe": Kind("GraniteMoe", GRANITE),
    "granite-moe-shared": Kind(
        "GraniteMoeShared",
        {
            **VARIED,
            "num_local_experts": 6,
            "shared_intermediate_size": 40,
            "attention_bias": True,
            "embedding_multiplier": 2.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
        },
        renamed(
            (r"input_linear\.weight$", "input_linear.weight"),
            (r"block_sparse_moe\.input_linear\.weight", "block_sparse_moe.experts.gate_up_proj"),
            (r"block_sparse_moe\.output_linear\.weight", "block_sparse_moe.experts.down_proj"),
            (r"block_sparse_moe\.router\.layer\.weight", "block_sparse_moe.router.weight"),
        ),
    ),
    "dbrx": Kind(
        "Dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.9, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 3},
        },
    ),
    "dbrx-not-normalised": Kind(
        "Dbrx",
        {
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 5, "rope_theta": 5000.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
                "ffn_act_fn": {"name": "gelu"},
            },
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "deepseek-v2-lite": Kind(
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "v_head_dim": 14,
            **YARN,
        },
    ),
    "deepseek-v2-stacked": Kind(
        "DeepseekV2",
        {
            **DEEPSEEK,
            **VARIED,
            "qk_rope_head_dim": 12,
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
            # Expanded from 14 tokens on, with values that are wider than keys.
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 4,
            "v_head_dim": 16,
        },
        QWEN_STACKED,
    ),
    "deepseek-v3": Kind(
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": 40,
            # Expanded from 11 tokens on.
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            **YARN,
        },
    ),
    "kimi-k2-stacked": Kind(
        "DeepseekV3",
        {
            **KIMI,
            **VARIED,
            "routed_scaling_factor": 1.3,
            "rope_interleave": False,
            "norm_topk_prob": False,
        },
        QWEN_STACKED,
    ),
    "glm4-moe-lite": Kind(
        "Glm4MoeLite",
        {
            **without(DEEPSEEK, "first_k_dense_replace"),
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm4-moe-lite-varied": Kind(
        "Glm4MoeLite",
        {
            **without(KIMI, "first_k_dense_replace"),
            **VARIED,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.3,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        QWEN_STACKED,
    ),
    "minimax-m2": Kind(
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "minimax-m2-varied": Kind(
        "MiniMaxM2",
        {**VARIED, "head_dim": 24, "num_local_experts": 4, **rope("linear", factor=3.0)},
        stacked("w1", "w3", "w2", (r"block_sparse_moe", "mlp")),
    ),
    "hy-v3": Kind("HYV3", {**SIZES, "head_dim": 16, "num_experts": 6}),
    "hy-v3-varied": Kind(
        "HYV3",
        {
            **SIZES,
            **VARIED,
            "head_dim": 24,
            "num_experts": 4,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
            "attention_bias": True,
            "mlp_bias": True,
            "enable_moe_fp32_combine": False,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        stacked(
            *("gate_proj", "up_proj", "down_proj"),
            (r"mlp\.router\.gate", "mlp.gate"),
            (r"mlp\.expert_bias", "mlp.e_score_correction_bias"),
            (r"mlp\.shared_mlp", "mlp.shared_experts"),
        ),
    ),
    "gpt-oss": Kind("GptOss", GPT_OSS),
    "gpt-oss-mxfp4": Kind("GptOss", GPT_OSS, packed, unpacked),
    "gpt-oss-no-bias": Kind(
        "GptOss",
        {
            **GPT_OSS,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
