"""Families whose feed-forward blocks are dense."""

from __future__ import annotations

from support.checkpoints.golden_kinds import disguises
from support.checkpoints.golden_kinds.base import (
    FACTORS,
    MAX_POSITIONS,
    VARIED,
    VOCABULARY,
    Kind,
    rope,
)

KINDS: dict[str, Kind] = {
    "llama": Kind("Llama", {"num_key_value_heads": 4}),
    "llama-grouped-tied": Kind("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-odd-vocabulary": Kind("Llama", {"vocab_size": VOCABULARY + 1}),
    "llama-odd-vocabulary-tied": Kind(
        "Llama",
        {"vocab_size": VOCABULARY + 1, "tie_word_embeddings": True},
    ),
    "llama-biases": Kind("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": Kind("Llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    "llama-relu": Kind("Llama", {"hidden_act": "relu"}),
    "llama-wide-heads": Kind("Llama", {"head_dim": 24}),
    "llama-linear": Kind("Llama", rope("linear", factor=4.0)),
    "llama-dynamic": Kind("Llama", rope("dynamic", factor=2.0)),
    "llama-llama3": Kind(
        "Llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-yarn": Kind(
        "Llama",
        rope("yarn", factor=8.0, original_max_position_embeddings=32),
    ),
    "llama-yarn-mscale": Kind(
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=1.2,
            mscale_all_dim=0.7,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "mistral": Kind("Mistral", {"sliding_window": None}),
    "mistral-window": Kind(
        "Mistral", {**VARIED, "sliding_window": 7, **rope("linear", factor=3.0)}
    ),
    "qwen2": Kind("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Kind(
        "Qwen2",
        {
            **VARIED,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            **rope("linear", factor=3.0),
        },
    ),
    "mimo": Kind("Qwen2", {"tie_word_embeddings": False}, disguise=disguises.mimo),
    "mimo-varied": Kind(
        "Qwen2",
        {
            **VARIED,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            **rope("linear", factor=3.0),
        },
        disguise=disguises.mimo,
    ),
    "qwen3": Kind("Qwen3", {"head_dim": 32}),
    "qwen3-window": Kind(
        "Qwen3",
        {
            **VARIED,
            **rope("linear", factor=3.0),
            "attention_bias": True,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "opt": Kind("OPT", {}),
    "opt-350m": Kind("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt-plain": Kind(
        "OPT",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-neox": Kind("GPTNeoX", {"num_key_value_heads": 4}),
    "gpt-neox-sequential": Kind(
        "GPTNeoX",
        {
            "num_key_value_heads": 4,
            "use_parallel_residual": False,
            "hidden_act": "relu",
            "layer_norm_eps": 1e-2,
            "tie_word_embeddings": True,
            "attention_bias": False,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "gemma2": Kind("Gemma2", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 24}),
    "gemma2-no-caps": Kind(
        "Gemma2",
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "attn_logit_softcapping": None,
            "attention_bias": True,
            "rms_norm_eps": 1e-2,
            "hidden_activation": "gelu",
            "tie_word_embeddings": False,
            **rope("linear", factor=3.0),
            "final_logit_softcapping": None,
        },
    ),
    "falcon-7b": Kind("Falcon", {}),
    "falcon-40b": Kind(
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "layer_norm_epsilon": 1e-2,
            "tie_word_embeddings": False,
            "activation": "relu",
            **rope("linear", factor=3.0),
        },
    ),
    "falcon-11b": Kind(
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": Kind(
        "Falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "bloom": Kind("Bloom", {}),
    "bloom-odd-heads": Kind(
        "Bloom",
        {"hidden_size": 48, "n_head": 6, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": False},
    ),
    "phi3": Kind("Phi3", {**VARIED, "sliding_window": 19}),
    "phi3-short": Kind(
        "Phi3",
        {
            "max_position_embeddings": 4 * MAX_POSITIONS,
            "original_max_position_embeddings": MAX_POSITIONS,
            **rope("longrope", partial_rotary_factor=0.5, **FACTORS),
        },
    ),
    # transformers chooses by the length of a text, we by that of all that may come.
    "phi3-long": Kind(
        "Phi3",
        {
            "original_max_position_embeddings": 32,
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                long_factor=FACTORS["long_factor"],
                short_factor=FACTORS["long_factor"],
            ),
        },
    ),
}
