"""The network in plain torch, with the tensor names of transformers' Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# What the tokenizer gives its special tokens, which are the first in its vocabulary.
BEGIN_ID, END_ID, PAD_ID = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """The architecture, by the names of transformers' LlamaConfig."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.groups = shape.num_attention_heads // shape.num_key_value_heads
        width = shape.num_attention_heads * shape.head_dim
        kv_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Repeated by hand: the fast attention backward does not take grouped heads everywhere.
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GatedMlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.self_attn = Attention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + functional.dropout(mixed, self.dropout, self.training)
        return x + functional.dropout(
            self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training
        )


class Decoder(nn.Module):
    """Token ids [rows, length + 1] -> mean cross-entropy of each next token, in nats."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        positions = torch.arange(shape.max_position_embeddings).float()
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # Projections into the residual stream start smaller, by its depth.
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * shape.num_hidden_layers) if into_stream else 1.0
                nn.init.normal_(weight, std=0.02 / scale)

    def forward(self, ids: Tensor) -> Tensor:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        cos, sin = self.cos[: inputs.shape[1]], self.sin[: inputs.shape[1]]
        x = functional.dropout(self.embed_tokens(inputs), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = functional.linear(self.norm(x), self.embed_tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [rows, heads, length, head_dim], halves rotated as Llama does."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)
