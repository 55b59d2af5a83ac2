"""Checkpoints of families that we don't have: transformers computes them, over our pool."""

from __future__ import annotations

from golden_kinds.base import Kind

_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 3.0,
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
    "helium": Kind("Helium", {"head_dim": 16}),
    "gemma4": Kind("Gemma4", _GEMMA4),
    # The last two layers read what the two before them have stored.
    "gemma4-shared": Kind("Gemma4", {**_GEMMA4, "num_kv_shared_layers": 2}),
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
    "cwm": Kind(
        "Cwm",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "jetmoe": Kind(
        "JetMoe",
        {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
