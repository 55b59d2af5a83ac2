"""Families that follow Llama: RMS norms before or behind, gated blocks."""

from __future__ import annotations

from support.checkpoints.golden_kinds import disguises
from support.checkpoints.golden_kinds.base import GEMMA4, LINEAR, NEAR_AND_FAR, VARIED, Kind, rope

WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_NEAR_FAR_FAR = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
BIASES = {"attention_bias": True, "mlp_bias": True}

_SPACE = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    # Else what is normed is small beside an epsilon of its size.
    "rms_norm_eps": 1e-2,
}
_GRANITE4 = {
    **_SPACE,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
}
_NEMOTRON = {
    "hybrid_override_pattern": "M-*M",
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-2,
    # Prompts of transformers have it, tokens behind them have not.
    "time_step_min": 1e-9,
}
_NEMOTRON_MOE = {
    **_NEMOTRON,
    "hybrid_override_pattern": "ME*E",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
_MAMBA2 = {
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-2,
}
_FALCON = {**_SPACE, "mamba_d_ssm": 96, "head_dim": 16}

KINDS: dict[str, Kind] = {
    "gemma": Kind("Gemma", {"head_dim": 16}),
    "gemma-varied": Kind(
        "Gemma",
        {
            "head_dim": 32,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_act": "relu",
            "tie_word_embeddings": False,
            **rope("linear", factor=3.0),
        },
    ),
    "gemma3": Kind("Gemma3", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2}),
    "gemma3-varied": Kind(
        "Gemma3",
        {
            "head_dim": 16,
            **WINDOWS,
            **NEAR_AND_FAR,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 4.0,
        },
    ),
    # Its attention has no scale: at one token of the tests' texts, float32 rounds by up to 1.5e-4
    # (against float64; 4e-5 at the others).
    "gemma4": Kind(
        "Gemma4", {**GEMMA4, **_NEAR_FAR_FAR, "num_kv_shared_layers": 0}, tolerance=3e-4
    ),
    # The last layer reads what the one before it has stored.
    "gemma4-shared": Kind(
        "Gemma4",
        {
            **GEMMA4,
            **_NEAR_FAR_FAR,
            "num_kv_shared_layers": 1,
            "use_double_wide_mlp": True,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4-varied": Kind(
        "Gemma4",
        {
            **GEMMA4,
            **_NEAR_FAR_FAR,
            **NEAR_AND_FAR,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
    ),
    "granite": Kind("Granite", {}),
    "granite-varied": Kind(
        "Granite",
        {
            **VARIED,
            **BIASES,
            **rope("linear", factor=3.0),
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "granite4": Kind("GraniteMoeHybrid", _GRANITE4),
    "granite4-varied": Kind(
        "GraniteMoeHybrid",
        {
            **_GRANITE4,
            **rope("linear", factor=3.0),
            "layer_types": ["mamba", "mamba", "attention"],
            "position_embedding_type": "rope",
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 0.5,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "rms_norm_eps": 3e-2,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": Kind("Bamba", {**_SPACE, "attn_layer_indices": [1]}),
    "bamba-varied": Kind(
        "Bamba",
        {
            **_SPACE,
            **rope("linear", factor=3.0, partial_rotary_factor=0.5),
            "attn_layer_indices": [0],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "rms_norm_eps": 3e-2,
            "tie_word_embeddings": True,
        },
    ),
    "codestral-mamba": Kind("Mamba2", _MAMBA2),
    "codestral-mamba-varied": Kind(
        "Mamba2",
        {
            **_MAMBA2,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
            "conv_kernel": 3,
            "layer_norm_epsilon": 3e-2,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h": Kind("NemotronH", _NEMOTRON, disguise=disguises.without_experts),
    "nemotron-h-varied": Kind(
        "NemotronH",
        {
            **_NEMOTRON,
            "hybrid_override_pattern": "-M-*",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_hidden_act": "silu",
            "n_groups": 1,
            "conv_kernel": 3,
            "layer_norm_epsilon": 3e-2,
        },
        disguise=disguises.without_experts,
    ),
    "nemotron-h-moe": Kind("NemotronH", _NEMOTRON_MOE),
    "nemotron-h-inner": Kind(
        "NemotronH",
        {
            **_NEMOTRON_MOE,
            "moe_latent_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon-h1": Kind("FalconH1", _FALCON),
    "falcon-h1-varied": Kind(
        "FalconH1",
        {
            **_FALCON,
            **rope("linear", factor=3.0),
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.7, 1.6],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 1.3],
            "rms_norm_eps": 3e-2,
            "tie_word_embeddings": True,
        },
    ),
    "falcon-h1-normed": Kind(
        "FalconH1", {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True}
    ),
    # What heads of so few numbers read is small beside what it is a sum of: without an epsilon of
    # its size the norm behind would show rounding alone, also transformers' own.
    "qwen3-5": Kind("Qwen3_5", {**LINEAR, "rms_norm_eps": 1e-2}),
    "qwen3-5-varied": Kind(
        "Qwen3_5",
        {
            **VARIED,
            **LINEAR,
            **rope("default", partial_rotary_factor=0.5),
            "hidden_act": "silu",
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 12,
            "rms_norm_eps": 3e-2,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        },
    ),
    "lfm2": Kind("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-varied": Kind(
        "Lfm2",
        {
            **rope("linear", factor=3.0),
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "norm_eps": 1e-2,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-adjusted": Kind(
        "Lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv"],
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 24,
        },
    ),
    "smollm3": Kind("SmolLM3", {}),
    "smollm3-varied": Kind(
        "SmolLM3",
        {
            **VARIED,
            **BIASES,
            "tie_word_embeddings": False,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 9,
            **rope("linear", factor=3.0),
        },
    ),
    "helium": Kind("Helium", {"head_dim": 16}),
    "helium-varied": Kind(
        "Helium", {**VARIED, **BIASES, "head_dim": 16, **rope("linear", factor=3.0)}
    ),
    "glm": Kind("Glm", {"head_dim": 16}),
    "glm-varied": Kind(
        "Glm",
        {
            **VARIED,
            "head_dim": 32,
            "attention_bias": False,
            **rope("linear", factor=3.0, partial_rotary_factor=0.25),
        },
    ),
    "glm4": Kind("Glm4", {"head_dim": 16}),
    "glm4-varied": Kind(
        "Glm4",
        {
            **VARIED,
            "head_dim": 32,
            "attention_bias": False,
            **rope("linear", factor=3.0, partial_rotary_factor=0.25),
        },
    ),
    "ministral": Kind("Ministral", {**WINDOWS, "head_dim": 16}),
    "ministral-varied": Kind(
        "Ministral", {**VARIED, "head_dim": 32, "sliding_window": 6, **rope("linear", factor=3.0)}
    ),
    "ministral3": Kind(
        "Ministral3",
        {
            "head_dim": 16,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.2,
                mscale_all_dim=0.7,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
    "ministral3-varied": Kind(
        "Ministral3",
        {
            **VARIED,
            "head_dim": 16,
            "sliding_window": 9,
            **rope("default", original_max_position_embeddings=40, llama_4_scaling_beta=0.1),
        },
    ),
    "internlm2": Kind("Llama", {}, disguise=disguises.internlm2),
    "internlm2-varied": Kind(
        "Llama",
        {**VARIED, "attention_bias": True, **rope("linear", factor=3.0)},
        disguise=disguises.internlm2,
    ),
    "internlm3": Kind("Llama", {}, disguise=disguises.internlm3),
    "internlm3-varied": Kind(
        "Llama",
        {**VARIED, **BIASES, "head_dim": 32, **rope("linear", factor=3.0)},
        disguise=disguises.internlm3,
    ),
    "baichuan-7b": Kind("Llama", {"num_key_value_heads": 4}, disguise=disguises.baichuan),
    "baichuan-13b": Kind(
        "Llama",
        {**VARIED, "num_key_value_heads": 4},
        disguise=disguises.baichuan_sloped,
        patch=disguises.sloped,
    ),
    "baichuan2": Kind(
        "Llama",
        {"num_key_value_heads": 4, "vocab_size": 97, **rope("linear", factor=3.0)},
        disguise=disguises.baichuan,
        patch=disguises.with_rows_of_length_one,
    ),
    "exaone3": Kind("Llama", {}, disguise=disguises.exaone3),
    "exaone3-varied": Kind(
        "Llama", {**VARIED, **rope("linear", factor=3.0)}, disguise=disguises.exaone3
    ),
    "exaone4": Kind("Exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-varied": Kind(
        "Exaone4",
        {
            **VARIED,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            **rope("linear", factor=3.0),
        },
    ),
    "olmo2": Kind("Olmo2", {"num_key_value_heads": 4}),
    "olmo2-varied": Kind("Olmo2", {**VARIED, "attention_bias": True, **rope("linear", factor=3.0)}),
    "olmo3": Kind("Olmo3", WINDOWS),
    "olmo3-varied": Kind(
        "Olmo3",
        {**VARIED, **NEAR_AND_FAR, "attention_bias": True, "sliding_window": 6},
    ),
    "seed-oss": Kind("SeedOss", {"head_dim": 16}),
    "seed-oss-varied": Kind(
        "SeedOss",
        {
            **VARIED,
            "head_dim": 32,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            **rope("linear", factor=3.0),
        },
    ),
    "ernie4.5": Kind("Ernie4_5", {"head_dim": 16}),
    "ernie4.5-varied": Kind(
        "Ernie4_5",
        {
            **VARIED,
            "head_dim": 32,
            "use_bias": True,
            "tie_word_embeddings": False,
            **rope("linear", factor=3.0),
        },
    ),
    "arcee": Kind("Arcee", {}),
    "arcee-varied": Kind("Arcee", {**VARIED, **BIASES, **rope("linear", factor=3.0)}),
}
