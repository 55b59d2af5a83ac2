"""Checkpoints of families that we don't have: transformers computes them, over our pool."""

from __future__ import annotations

from support.checkpoints.golden_kinds.base import GEMMA4, Kind

_GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 40,
}
_LLAMA4 = {
    "intermediate_size_mlp": 96,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "no_rope_layers": [1, 0, 1],
    # Texts are longer than that, so that it matters.
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.3,
}

TIER_KINDS: dict[str, Kind] = {
    "apertus": Kind("Apertus", {}),
    "gemma4-experts": Kind(
        "Gemma4",
        {
            **GEMMA4,
            **_GEMMA4_EXPERTS,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_kv_shared_layers": 0,
        },
    ),
    # The last layer reads what the one before it has stored.
    "gemma4-experts-shared": Kind(
        "Gemma4",
        {
            **GEMMA4,
            **_GEMMA4_EXPERTS,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
        },
    ),
    "llama4": Kind("Llama4", _LLAMA4),
    # Values are shorter than keys, which are turned in part.
    "minicpm3": Kind(
        "MiniCPM3",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
        },
    ),
    "jetmoe": Kind(
        "JetMoe",
        {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
#: Fewer tokens are chosen than texts have, so that it matters which. Of few heads many scores would
#: be zero, and which of those are chosen is nowhere said.
_INDEXED = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
#: Checkpoints of families with caches of their own.
PADDED_KINDS: dict[str, Kind] = {
    "deepseek-v32": Kind("DeepseekV32", {**_ENDS, **_INDEXED, **_LATENT}),
    "glm-moe-dsa": Kind("GlmMoeDsa", {**_ENDS, **_INDEXED, **_LATENT}),
    "deepseek-v4": Kind(
        "DeepseekV4",
        {
            **_ENDS,
            **_INDEXED,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 9,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_topk": 4,
            "layer_types": [
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        },
    ),
    "jamba": Kind(
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    # With bounds of steps, which our family has not.
    "mamba2": Kind(
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "time_step_limit": [0.0, 1e4],
        },
    ),
    "rwkv": Kind("Rwkv", {"attention_hidden_size": 64}),
    "olmo-hybrid": Kind(
        "OlmoHybrid",
        {
            **_ENDS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "t5": Kind("T5ForConditionalGeneration", {**_ENDS, "d_ff": 96, "d_kv": 16}),
    "bart": Kind(
        "BartForConditionalGeneration",
        {
            **_ENDS,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "forced_eos_token_id": None,
        },
    ),
}
