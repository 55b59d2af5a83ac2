"""Medusa heads of random weights in each published layout, and what they say in plain torch."""

from __future__ import annotations

import functools
import json
import math

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

HEADS, BLOCKS = 4, 2
FILE = "medusa_lm_head.safetensors"
#: Of the embedded model.
WIDTH, VOCABULARY = 256, 4096


@functools.cache
def tensors(width=WIDTH, vocabulary=VOCABULARY, heads=HEADS, blocks=BLOCKS):
    """Of `heads` heads of so many blocks, by the names that the authors publish."""
    made = {}
    draw = torch.Generator().manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=draw) / math.sqrt(width)

    for i in range(heads):
        for j in range(blocks):
            made[f"{i}.{j}.linear.weight"] = drawn(width, width)
            made[f"{i}.{j}.linear.bias"] = drawn(width)
        made[f"{i}.{blocks}.weight"] = drawn(vocabulary, width)
    return made


def config(heads=HEADS, blocks=BLOCKS):
    """As the authors' and TGI's."""
    return {
        "base_model_name_or_path": "some/model",
        "medusa_num_heads": heads,
        "medusa_num_layers": blocks,
    }


def vllm_config(**fields):
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": WIDTH,
        "vocab_size": VOCABULARY,
        "num_heads": HEADS,
        "num_hidden_layers": BLOCKS,
        "medusa_fc_bias": True,
    } | fields


def as_vllm(made, blocks=BLOCKS):
    """The same tensors by vLLM's names."""
    names = {}
    for name in made:
        i, j, *rest = name.split(".")
        block = f"blocks.{i}.layers.{j}.{rest[-1]}"
        names[name] = f"lm_heads.{i}.weight" if int(j) == blocks else block
    return {names[name]: tensor for name, tensor in made.items()}


def save(folder, made=None, fields=None, file=FILE):
    """A folder of heads."""
    folder.mkdir(exist_ok=True)
    save_file(tensors() if made is None else made, folder / file)
    (folder / "config.json").write_text(json.dumps(config() if fields is None else fields))
    return folder


def defined(w, hidden, head=None, heads=HEADS, blocks=BLOCKS):
    """[heads, n, vocabulary] of hidden states [n, width]; `head`: one matrix for all heads."""
    found = []
    for i in range(heads):
        x = hidden
        for j in range(blocks):
            x = x + silu(x @ w[f"{i}.{j}.linear.weight"].T + w[f"{i}.{j}.linear.bias"])
        found.append(x @ (w[f"{i}.{blocks}.weight"] if head is None else head).T)
    return torch.stack(found)
