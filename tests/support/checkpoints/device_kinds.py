"""The models that are run on a GPU: golden checkpoints, but large enough for what it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.checkpoints.golden_kinds.base import rope
from support.engines.device_models import POSITIONS, VOCABULARY

#: Large enough for the kernels and tiles that real models get.
LARGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.04,
}
#: DeepSeek's rows and heads.
LATENT = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GEMMA4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 100,
    "vocab_size_per_layer_input": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
DELTA = {
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
SPACE = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128}
#: name -> (kind, more settings).
MODELS = {
    "llama": ("llama", {"head_dim": 128}),
    "llama3": ("llama-llama3", {}),
    "mistral-window": ("mistral-window", {"sliding_window": 100}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3-moe", {"moe_intermediate_size": 512}),
    "qwen2-moe": ("qwen2-moe", {"moe_intermediate_size": 512}),
    "glm4-moe": ("glm4-moe", {"head_dim": 128, "moe_intermediate_size": 512}),
    "ernie4-5-moe": ("ernie4-5-moe", {"moe_intermediate_size": 512}),
    "olmoe": ("olmoe", {"intermediate_size": 512}),
    "phimoe": ("phimoe", {"intermediate_size": 512}),
    "granite-moe": ("granite-moe", {"intermediate_size": 512}),
    "gemma4": ("gemma4-shared", GEMMA4),
    "gemma4-values": ("gemma4-varied", {**GEMMA4, "num_kv_shared_layers": 0}),
    "qwen3-5": ("qwen3-5", DELTA),
    "qwen3-5-moe": ("qwen3-5-moe", {**DELTA, "moe_intermediate_size": 512}),
    "qwen3-next": ("qwen3-next", {**DELTA, "moe_intermediate_size": 512}),
    "kimi-linear": (
        "kimi-linear",
        {
            **LATENT,
            "linear_head_dim": 128,
            "linear_num_heads": 8,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "mimo-v2": (
        "mimo-v2",
        {
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 100,
            "moe_intermediate_size": 512,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "granite4": (
        "granite4-moe",
        {**SPACE, "layer_types": ["mamba", "attention"] * 2, "intermediate_size": 512},
    ),
    "nemotron-h": (
        "nemotron-h",
        {
            "hybrid_override_pattern": "M-*-",
            "head_dim": 64,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
        },
    ),
    "nemotron-h-inner": (
        "nemotron-h-inner",
        {
            "hybrid_override_pattern": "ME*E",
            "head_dim": 64,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "moe_intermediate_size": 320,
            "moe_shared_expert_intermediate_size": 512,
            "moe_latent_size": 256,
        },
    ),
    "falcon-h1": (
        "falcon-h1-varied",
        {**SPACE, "mamba_d_ssm": 2048, "head_dim": 64, "mamba_d_state": 256},
    ),
    "gpt-oss": ("gpt-oss", {"head_dim": 64, "intermediate_size": 512, "sliding_window": 100}),
    "glm4-moe-lite": (
        "glm4-moe-lite",
        {**LATENT, "q_lora_rank": 384, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "minimax-m2": ("minimax-m2", {"head_dim": 128, "intermediate_size": 512}),
    "hy-v3": ("hy-v3", {"head_dim": 128, "moe_intermediate_size": 512}),
    "deepseek-v2": ("deepseek-v2-lite", LATENT),
    "deepseek-v3": ("deepseek-v3", {**LATENT, "q_lora_rank": 384}),
    # Computed by transformers.
    "apertus": ("apertus", {"head_dim": 128}),
    "gemma4-experts": ("gemma4-experts-shared", GEMMA4),
    "minicpm3": ("minicpm3", {**LATENT, "kv_lora_rank": 256, "v_head_dim": 64}),
    # The same, with a cache of its own.
    "mamba2": ("mamba2", {"num_heads": 32, "head_dim": 64, "state_size": 64}),
}


@dataclass(frozen=True)
class Once:
    """A family whose layers are of others' kinds: it is run with fewer of them."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    #: Tokens of the longest prompt.
    longest: int = 450
    #: Times transformers' error that ours may be.
    error: float = 1.1


#: For kinds without a base of their own.
_WIDE = {**LARGE, "num_hidden_layers": 3}
_MAMBA2 = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_heads": 32,
    "head_dim": 64,
    "state_size": 128,
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 1024, "n_layer": 3, "n_head": 16}
_MPT = {
    "vocab_size": VOCABULARY,
    "d_model": 1024,
    "n_layers": 3,
    "n_heads": 16,
    "max_seq_len": POSITIONS,
}
_SOME = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "max_position_embeddings": POSITIONS,
}
_WINDOW = {**_WIDE, "sliding_window": 100}

#: Of every family that MODELS lacks.
ONCE: tuple[Once, ...] = (
    Once("arcee", _WIDE),
    Once("bamba", {**_WIDE, **SPACE}),
    # The tests' slopes are of four heads.
    Once(
        "baichuan-13b",
        {**_WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu"},
    ),
    Once(
        "bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 1024, "n_layer": 3, "n_head": 16},
    ),
    # Nothing but memories, and without mamba_ssm transformers computes those in 32 bits throughout:
    # it rounds less than that library's kernels, or ours (1.47 times on an H200).
    Once("codestral-mamba", _MAMBA2, error=1.6),
    Once("cohere-varied", {**_WIDE, "hidden_act": "silu"}),
    Once("cohere2", _WINDOW),
    Once(
        "dbrx",
        {
            **_MPT,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 6, "moe_top_k": 3},
        },
    ),
    Once("ernie4.5", {**_WIDE, "head_dim": 64}),
    Once("exaone3", _WIDE),
    Once("exaone4", _WINDOW),
    Once("falcon-7b", {**_SOME, "ffn_hidden_size": 4096}),
    Once("falcon-40b", {**_SOME, "ffn_hidden_size": 4096, "num_kv_heads": 4}),
    # transformers rounds what these slopes add to bfloat16: it is exact for as many heads, and for
    # texts of fewer than 256 tokens.
    Once("falcon-rw", {**_SOME, "ffn_hidden_size": 4096, "num_attention_heads": 8}, longest=200),
    Once("gemma", {**_WIDE, "head_dim": 256}),
    Once("gemma2", {**_WINDOW, "head_dim": 256, "query_pre_attn_scalar": 256}),
    Once("gemma3-varied", {**_WINDOW, "head_dim": 128}),
    Once("glm", {**_WIDE, "head_dim": 128}),
    Once("glm4", {**_WIDE, "head_dim": 128}),
    Once("helium", {**_WIDE, "head_dim": 64}),
    Once("gpt2", {**_GPT, "n_positions": POSITIONS}),
    Once("gpt-bigcode", {**_GPT, "n_positions": POSITIONS}),
    Once("gptj", {**_GPT, "n_positions": POSITIONS, "rotary_dim": 32}),
    Once("gpt-neox", {**_WIDE, "num_key_value_heads": 16}),
    Once("granite-varied", {**_WIDE, "hidden_act": "silu"}),
    Once("internlm2", _WIDE),
    Once("internlm3", {**_WIDE, "head_dim": 64}),
    Once("lfm2-moe", {**_WIDE, "moe_intermediate_size": 512}),
    Once("mimo", _WIDE),
    Once("ministral", {**_WINDOW, "head_dim": 128}),
    Once("ministral3", {**_WIDE, "head_dim": 128}),
    Once("mpt", _MPT),
    Once("nemotron", _WIDE),
    Once("olmo", _WIDE),
    Once("olmo2", _WIDE),
    Once("olmo3", _WINDOW),
    Once("opt", {**_SOME, "ffn_dim": 4096}),
    Once("phi", _WIDE),
    Once("phi3", _WINDOW),
    Once(
        "phi3-long",
        {
            **_WIDE,
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                long_factor=[1.0 + i / 4 for i in range(16)],
                short_factor=[1.0 + i / 4 for i in range(16)],
            ),
        },
    ),
    Once("seed-oss", {**_WIDE, "head_dim": 128}),
    Once("smollm3-varied", {**_WINDOW, "hidden_act": "silu"}),
    Once("stablelm-varied", {**_WIDE, "num_key_value_heads": 16, "hidden_act": "silu"}),
    Once("starcoder2", _WIDE),
)
