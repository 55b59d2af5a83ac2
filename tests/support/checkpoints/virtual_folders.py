"""Virtual tokens in PEFT's layout, written without PEFT, and what transformers makes of them.

The layout is that of PEFT's `save_pretrained`: one tensor, `prompt_embeddings`, of a prompt
[tokens, width], of a prefix [tokens, layers · 2 · heads · head_dim] (huggingface/peft 0.21,
src/peft/peft_model.py, `get_prompt_embedding_to_save` and `get_prompt`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

PROMPT, P_TUNING, PREFIX = "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"


def write_virtual(
    folder: Path,
    base: Path,
    kind: str,
    tokens: int,
    *,
    seed: int = 0,
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """An adapter with random virtual tokens, or with `tensors`; `config`: more of its fields."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": kind,
        "num_virtual_tokens": tokens,
        "num_transformer_submodules": 1,
        "task_type": "CAUSAL_LM",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    if tensors is None:
        generator = torch.Generator().manual_seed(seed)
        shape = (tokens, width_of(base, kind))
        tensors = {"prompt_embeddings": torch.randn(shape, generator=generator)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def width_of(base: Path, kind: str) -> int:
    """Numbers of a virtual token."""
    config = AutoConfig.from_pretrained(base)
    if kind != PREFIX:
        return getattr(config, "word_embed_proj_dim", None) or config.hidden_size
    heads, head_dim = kv_shape(config)
    return config.num_hidden_layers * 2 * heads * head_dim


def kv_shape(config: Any) -> tuple[int, int]:
    """Key/value heads, and numbers of one."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim


class Expected:
    """A base in transformers, with virtual tokens as PEFT puts them there."""

    def __init__(self, base: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    @torch.no_grad()
    def greedy(self, folder: Path | None, ids: list[int], new: int) -> tuple[list[int], list[Any]]:
        """The tokens, and [ids + new - 1, vocabulary] log probabilities from the prompt's first."""
        made = list(ids)
        for _ in range(new):
            scores = self.scores(folder, made)
            made.append(int(scores[-1].argmax()))
        return made[len(ids) :], scores

    @torch.no_grad()
    def scores(self, folder: Path | None, ids: list[int]) -> torch.Tensor:
        """[ids, vocabulary] log probabilities."""
        tokens = torch.tensor([ids])
        if folder is None:
            return self.model(tokens).logits[0].log_softmax(-1)
        config = json.loads((folder / "adapter_config.json").read_text())
        virtual = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
        if config["peft_type"] != PREFIX:
            table = self.model.get_input_embeddings()
            embeds = torch.cat((virtual[None], table(tokens)), dim=1)
            return self.model(inputs_embeds=embeds).logits[0, len(virtual) :].log_softmax(-1)
        heads, head_dim = kv_shape(self.model.config)
        layers = self.model.config.num_hidden_layers
        # [layers · 2, batch, heads, tokens, head_dim]
        numbers = virtual.view(1, len(virtual), layers * 2, heads, head_dim).permute(2, 0, 3, 1, 4)
        cache = DynamicCache()
        for layer in range(layers):
            cache.update(numbers[2 * layer], numbers[2 * layer + 1], layer)
        mask = torch.ones(1, len(virtual) + len(ids), dtype=torch.int64)
        found = self.model(tokens, past_key_values=cache, attention_mask=mask)
        return found.logits[0].log_softmax(-1)
