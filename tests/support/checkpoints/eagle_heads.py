"""EAGLE-3 heads of random weights in the published format, and their definition in plain torch."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu


class Sizes(NamedTuple):
    """Of a head; by default one of the embedded model's."""

    hidden: int = 256
    heads: int = 4
    keys: int = 2
    inner: int = 96
    guesses: int = 300
    vocabulary: int = 4096
    positions: int = 2048

    @property
    def dim(self) -> int:
        return self.hidden // self.heads


DEMO = Sizes()


def config(sizes):
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.keys,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": sizes.vocabulary,
        "draft_vocab_size": sizes.guesses,
        "torch_dtype": "float32",
    }


def tensors(layer="midlayer.", sizes=DEMO):
    """Random weights, by the names that the authors publish."""
    torch.manual_seed(0)
    hidden, heads, keys, inner, guesses, vocabulary, _ = sizes
    dim = sizes.dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        f"{layer}self_attn.k_proj.weight": (keys * dim, 2 * hidden),
        f"{layer}self_attn.v_proj.weight": (keys * dim, 2 * hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (guesses, hidden),
    }
    made = {name: torch.randn(shape) / math.sqrt(shape[1]) for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"{layer}{norm}.weight" for norm in norms), "norm.weight"):
        made[name] = 1 + torch.randn(hidden) / 4
    known = torch.randperm(vocabulary)[:guesses].sort().values
    made["d2t"] = known - torch.arange(guesses)
    made["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, known, True)
    return made


def save(folder, made=None, sizes=DEMO, **fields):
    folder.mkdir(exist_ok=True)
    save_file(made or tensors(sizes=sizes), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config(sizes) | fields))
    return folder


def defined(w, table, tokens, streams, sizes=DEMO, then=None):
    """The definition: tokens from 1 on, each with the feature of the one before, and a guess more.

    Returns logits [n, vocabulary] behind each entry, and those behind a further token (`then`, by
    default the likeliest), whose feature is the last entry's stream.
    """
    heads, keys, dim = sizes.heads, sizes.keys, sizes.dim

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def turned(x, positions):
        angles = positions[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def layer(embedded, feature):
        at, n = "midlayer.", len(embedded)
        x = torch.cat(
            [norm(embedded, f"{at}input_layernorm"), norm(feature, f"{at}hidden_norm")], 1
        )
        q, k, v = ((x @ w[f"{at}self_attn.{p}_proj.weight"].T).view(n, -1, dim) for p in "qkv")
        q, k = (turned(each, torch.arange(n)) for each in (q, k))
        k, v = (each.repeat_interleave(heads // keys, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
        scores += torch.full((n, n), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        feature = feature + mixed @ w[f"{at}self_attn.o_proj.weight"].T
        inner = norm(feature, f"{at}post_attention_layernorm")
        gate, up = (inner @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return feature + (silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T

    def said(stream):
        logits = torch.full((len(stream), sizes.vocabulary), -torch.inf)
        logits[:, torch.arange(sizes.guesses) + w["d2t"]] = (
            norm(stream, "norm") @ w["lm_head.weight"].T
        )
        return logits

    feature = streams @ w["fc.weight"].T
    entries = layer(table[tokens[1:]], feature[:-1])
    guess = said(entries)[-1:].argmax(-1) if then is None else torch.tensor([then])
    more = layer(table[torch.cat([tokens[1:], guess])], torch.cat([feature[:-1], entries[-1:]]))
    return said(entries), said(more)[-1]
