"""Families with mixtures of experts."""

from __future__ import annotations

from support.checkpoints.golden_kinds.base import VARIED, Kind, rope

KINDS: dict[str, Kind] = {
    "mixtral": Kind("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-window": Kind(
        "Mixtral",
        {
            **VARIED,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "sliding_window": 9,
            **rope("linear", factor=3.0),
        },
    ),
    "qwen3-moe": Kind(
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-some-dense": Kind(
        "Qwen3Moe",
        {
            **VARIED,
            **rope("linear", factor=3.0),
            "attention_bias": True,
            "num_hidden_layers": 5,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 11,
        },
    ),
}
