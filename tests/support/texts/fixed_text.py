"""A model folder that always writes the same text, cut into tokens as its maker likes.

It has one layer that adds nothing. A token of the text leads to the next one, the last to the end,
and any other token to the first: so whatever the prompt is, the text follows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.checkpoints.demo import DEMO

_HEADS, _HEAD = 2, 32


def save(folder: Path, pieces: Sequence[str], template: str) -> Path:
    """The embedded model's tokenizer with a token for each piece, and weights that write them.

    Args:
        pieces: at most 63 different texts that no prompt ends with; together they are what is said.
        template: of chats.
    """
    hidden, inner = _HEADS * _HEAD, 8
    assert len(pieces) < hidden
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    first = config["vocab_size"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": first + at, "content": piece, "special": False, **plain}
        for at, piece in enumerate(pieces)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config |= {"vocab_size": first + len(pieces), "hidden_size": hidden, "num_hidden_layers": 1}
    config |= {"intermediate_size": inner, "num_attention_heads": _HEADS, "head_dim": _HEAD}
    config |= {"num_key_value_heads": _HEADS, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    embedding = torch.zeros(config["vocab_size"], hidden)
    embedding[:first, 0] = 1
    head = torch.zeros_like(embedding)
    leads_to = [*range(first, config["vocab_size"]), config["eos_token_id"]]
    for state, token in enumerate(leads_to):
        head[token, state] = 1
        if state:
            embedding[first + state - 1, state] = 1
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    layer = "model.layers.0."
    for name in ("q", "k", "v", "o"):
        weights[f"{layer}self_attn.{name}_proj.weight"] = torch.zeros(hidden, hidden)
    for name in ("gate", "up"):
        weights[f"{layer}mlp.{name}_proj.weight"] = torch.zeros(inner, hidden)
    weights[f"{layer}mlp.down_proj.weight"] = torch.zeros(hidden, inner)
    for name in (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    return folder
