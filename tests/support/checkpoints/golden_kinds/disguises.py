"""Families that transformers does not carry, as Llama under other names, and what differs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def without_experts(config: Config, tensors: Tensors) -> None:
    """Nemotron-H as published, whose config says nothing of experts where it has none."""
    del tensors
    begins = ("moe_", "n_routed_", "n_shared_", "num_experts_", "norm_topk_", "routed_", "topk_")
    for name in [name for name in config if name.startswith(begins) or name == "n_group"]:
        del config[name]


def _renamed(tensors: Tensors, names: dict[str, str]) -> None:
    for name in list(tensors):
        new = name
        for old, other in names.items():
            new = new.replace(old, other)
        tensors[new] = tensors.pop(name)


def _fuse(tensors: Tensors, layer: str, name: str, groups: int) -> None:
    """Queries, keys and values of a layer as one tensor, group by group."""
    for kind in ("weight", "bias"):
        parts = [tensors.pop(f"{layer}self_attn.{x}_proj.{kind}", None) for x in "qkv"]
        if parts[0] is not None:
            cut = [part.view(groups, -1, *part.shape[1:]) for part in parts]
            tensors[f"{layer}{name}.{kind}"] = torch.cat(cut, dim=1).flatten(0, 1)


def internlm2(config: Config, tensors: Tensors) -> None:
    config["architectures"] = ["InternLM2ForCausalLM"]
    config["bias"] = config.pop("attention_bias")
    del config["mlp_bias"]
    for i in range(config["num_hidden_layers"]):
        _fuse(tensors, f"model.layers.{i}.", "attention.wqkv", config["num_key_value_heads"])
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    _renamed(tensors, names)


def mimo(config: Config, tensors: Tensors) -> None:
    del tensors
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}


def internlm3(config: Config, tensors: Tensors) -> None:
    config["architectures"] = ["InternLM3ForCausalLM"]
    config["qkv_bias"] = config.pop("attention_bias")
    config["bias"] = config.pop("mlp_bias")


def exaone3(config: Config, tensors: Tensors) -> None:
    config["architectures"] = ["ExaoneForCausalLM"]
    del config["attention_bias"], config["mlp_bias"]
    new = {"num_hidden_layers": "num_layers", "rms_norm_eps": "layer_norm_epsilon"}
    for old, other in {**new, "hidden_act": "activation_function"}.items():
        config[other] = config.pop(old)
    names = {
        "model.layers": "transformer.h",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
        "mlp.down_proj": "mlp.c_proj",
    }
    _renamed(tensors, names)


def baichuan(config: Config, tensors: Tensors) -> None:
    config["architectures"] = ["BaichuanForCausalLM"]
    del config["attention_bias"], config["mlp_bias"]
    config["model_max_length"] = config["max_position_embeddings"]
    for i in range(config["num_hidden_layers"]):
        _fuse(tensors, f"model.layers.{i}.", "self_attn.W_pack", 1)


def baichuan_sloped(config: Config, tensors: Tensors) -> None:
    """13B: positions are distances."""
    baichuan(config, tensors)
    del config["max_position_embeddings"], config["rope_parameters"]


def with_rows_of_length_one(model: Any) -> None:
    """Baichuan 2's head."""
    with torch.no_grad():
        head = model.lm_head.weight
        head /= head.square().sum(-1, keepdim=True).sqrt()


def sloped(model: Any) -> None:
    """Llama's attention with ALiBi (Press et al. 2021) instead of its rotation."""
    for layer in model.model.layers:
        layer.self_attn = _Sloped(layer.self_attn)


class _Sloped(nn.Module):
    """The attention of a layer of four heads."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        inner, (batch, length, _) = self.inner, hidden_states.shape
        q, k, v = (
            product(hidden_states).view(batch, length, 4, -1).transpose(1, 2)
            for product in (inner.q_proj, inner.k_proj, inner.v_proj)
        )
        at = torch.arange(length, device=q.device)
        distances = at[:, None] - at
        slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625], device=q.device)[:, None, None]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 - slopes * distances
        seen = scores.masked_fill(distances < 0, float("-inf")).softmax(-1).to(v.dtype) @ v
        return inner.o_proj(seen.transpose(1, 2).flatten(2)), None
