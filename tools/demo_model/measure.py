"""What the trained model is worth: bits per byte next to gzip and xz, and completions to read."""

from __future__ import annotations

import gzip
import lzma
import math
import platform
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .corpus import split, standard_library
from .network import END_ID, Shape

PROMPTS = (
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n'
    "        self._items = []\n\n    def push(self, item):\n",
    "def fibonacci(n):",
    "import os\n\ndef ",
    "class Stack:\n    def __init__(self",
    "with open(path) as f:\n    for line in f:\n",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n",
)


@torch.no_grad()
def bits(model: Any, ids: list[int], length: int) -> float:
    """Bits to code ids[1:] given ids[0], in windows of `length` that overlap by half.

    Each token is scored once, with at least length / 2 tokens before it where the text has them.
    """
    tokens = torch.tensor(ids)
    total, scored = 0.0, 1
    for start in range(0, max(1, len(ids) - length // 2), length // 2):
        window = tokens[start : start + length]
        logits = model(window[None, :-1]).logits[0].float()
        nats = functional.cross_entropy(logits, window[1:], reduction="none")
        total += float(nats[scored - start - 1 :].sum())
        scored = start + len(window)
    return total / math.log(2)


def complete(model: Any, tokenizer: Any, prompt: str, new_tokens: int, penalty: float) -> str:
    """The prompt with its greedy continuation."""
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(
        inputs["input_ids"],
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=penalty,
    )
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))


def packed_sizes(train: list[bytes], held_out: list[bytes]) -> dict[str, int]:
    """Bytes that gzip and xz need for the held-out files, by how they may look around."""

    def xz(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    together, before = b"".join(held_out), b"".join(train)
    return {
        "gzip -9, each file alone": sum(len(gzip.compress(s, 9)) for s in held_out),
        "gzip -9, all concatenated": len(gzip.compress(together, 9)),
        "xz -9e, each file alone": sum(map(xz, held_out)),
        "xz -9e, all concatenated": xz(together),
        # Its dictionary of 64 MiB holds the whole training set.
        "xz -9e, after the training set": xz(before + together) - xz(before),
    }


def evaluate(model_dir: Path) -> None:
    """Print bits per byte of the model, gzip and xz on the same files, and greedy completions."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    train, held_out = (list(part.values()) for part in split(standard_library()))
    count = sum(map(len, held_out))
    total = 0.0
    for source in held_out:
        ids = [*tokenizer(source.decode(), verbose=False)["input_ids"], END_ID]
        total += bits(model, ids, Shape.max_position_embeddings)
    print(f"Python {platform.python_version()}, {len(held_out)} held-out modules, {count} bytes")
    print(f"{'this model, each file alone':32} {total / count:.3f} bits per byte")
    for name, packed in packed_sizes(train, held_out).items():
        print(f"{name:32} {8 * packed / count:.3f} bits per byte")
    for penalty in (1.0, 1.1):
        for prompt in PROMPTS:
            print(f"--- greedy, repetition penalty {penalty}")
            print(complete(model, tokenizer, prompt, 96, penalty))
