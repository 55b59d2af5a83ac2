"""Families with layer norms, most of them with blocks without gates."""

from __future__ import annotations

from support.checkpoints.golden_kinds.base import Kind, rope

WINDOWS = {
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
#: Values of fields that are nobody's default.
VARIED = {"layer_norm_eps": 1e-2, "hidden_act": "relu"}

KINDS: dict[str, Kind] = {
    "phi": Kind("Phi", {"num_key_value_heads": 4}),
    "phi-varied": Kind(
        "Phi",
        {
            **VARIED,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            **rope("linear", factor=3.0, partial_rotary_factor=0.75),
        },
    ),
    "gpt2": Kind("GPT2LMHeadModel", {}),
    "gpt2-varied": Kind(
        "GPT2LMHeadModel",
        {
            "n_inner": 112,
            "layer_norm_epsilon": 1e-2,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-bigcode": Kind("GPTBigCode", {}),
    "gpt-bigcode-varied": Kind(
        "GPTBigCode",
        {
            "n_inner": 112,
            "multi_query": False,
            "layer_norm_epsilon": 1e-2,
            "activation_function": "relu",
            "scale_attn_weights": False,
            "tie_word_embeddings": False,
        },
    ),
    "gptj": Kind("GPTJ", {"rotary_dim": 8}),
    "gptj-varied": Kind(
        "GPTJ",
        {
            "n_inner": 112,
            "rotary_dim": 16,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-2,
            "activation_function": "relu",
        },
    ),
    "starcoder2": Kind("Starcoder2", {}),
    "starcoder2-varied": Kind(
        "Starcoder2",
        {
            "norm_epsilon": 1e-2,
            "hidden_act": "relu",
            "use_bias": False,
            "sliding_window": 9,
            "tie_word_embeddings": False,
            **rope("linear", factor=3.0),
        },
    ),
    "mpt": Kind("Mpt", {}),
    "mpt-varied": Kind(
        "Mpt",
        {
            "layer_norm_epsilon": 1e-2,
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.4},
            "tie_word_embeddings": False,
        },
    ),
    "mpt-odd-heads": Kind("Mpt", {"d_model": 96, "n_heads": 6}),
    "stablelm": Kind("StableLm", {}),
    "stablelm-varied": Kind(
        "StableLm",
        {
            **VARIED,
            "num_key_value_heads": 4,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "tie_word_embeddings": True,
            **rope("linear", factor=3.0, partial_rotary_factor=0.5),
        },
    ),
    "olmo": Kind("Olmo", {}),
    "olmo-varied": Kind(
        "Olmo",
        {
            "attention_bias": True,
            "hidden_act": "gelu",
            "clip_qkv": 0.4,
            "tie_word_embeddings": True,
            **rope("linear", factor=3.0),
        },
    ),
    "cohere": Kind("Cohere", {}),
    "cohere-varied": Kind(
        "Cohere",
        {
            **VARIED,
            "attention_bias": True,
            "use_qk_norm": True,
            "logit_scale": 0.8,
            "tie_word_embeddings": False,
            **rope("linear", factor=3.0),
        },
    ),
    "cohere2": Kind("Cohere2", {**WINDOWS}),
    "cohere2-varied": Kind(
        "Cohere2",
        {
            **VARIED,
            "attention_bias": True,
            "logit_scale": 0.8,
            "tie_word_embeddings": False,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            **rope("linear", factor=3.0),
        },
    ),
    "nemotron": Kind("Nemotron", {}),
    "nemotron-varied": Kind(
        "Nemotron",
        {
            "norm_eps": 1e-2,
            "hidden_act": "silu",
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            **rope("linear", factor=3.0, partial_rotary_factor=0.25),
        },
    ),
}
