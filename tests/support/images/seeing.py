"""Tiny random checkpoints that see, with a tokenizer, a chat template and a processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from support.checkpoints.demo import DEMO
from support.checkpoints.golden import Golden
from support.checkpoints.golden_kinds import NESTED_KINDS

#: Of the embedding's table: the demo's tokens and those below.
VOCABULARY = 4224
_MARKS = ("<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_LLAVA = """{% for message in messages %}{{ message.role + ': ' }}{% if message.content is string
 %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image'
 %}{{ '<image>\\n' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif
 %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
_QWEN = _LLAVA.replace("<image>\\n", "<|vision_start|><|image_pad|><|vision_end|>")
_SIDE = 16

#: By kind: the token for a row, the template, and the processor.
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llava": (
        "<image>",
        _LLAVA,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": _SIDE},
            "crop_size": {"height": _SIDE, "width": _SIDE},
        },
    ),
}


class Seeing:
    """A checkpoint in a folder, and what transformers makes of it.

    Args:
        kind: one of those of the golden checkpoints.
        folder: for it alone.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        from transformers import AutoImageProcessor

        self.token, template, processor = _KINDS[kind]
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
        self.token_id = tokenizer.token_to_id(self.token)
        assert self.token_id < VOCABULARY
        text = NESTED_KINDS[kind].settings["text_config"]
        fields = dict.fromkeys(("image_token_id", "image_token_index"), self.token_id)
        golden = Golden(kind, text_config={**text, "vocab_size": VOCABULARY}, **fields)
        golden.save(folder)
        self.folder, self.model, self.tokenizer = folder, golden.model, tokenizer
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((DEMO / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        self._process = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def prepared(self, image: Image.Image) -> dict[str, np.ndarray]:
        """What the processor makes of an image."""
        made = self._process(image, return_tensors="np")
        return {name: np.ascontiguousarray(value) for name, value in made.items()}

    def greedy(self, prompt: list[int], images: list[Image.Image], count: int) -> list[int]:
        """So many tokens by transformers, each from the whole text anew.

        Args:
            prompt: with one token for each row of each image.
        """
        prepared = [self.prepared(image) for image in images]
        tensors = {
            name: torch.from_numpy(np.concatenate([each[name] for each in prepared]))
            for name in (prepared[0] if prepared else ())
        }
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                logits = self.model(
                    input_ids=torch.tensor([ids]), use_cache=False, **tensors
                ).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]
