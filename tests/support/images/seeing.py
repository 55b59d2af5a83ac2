"""Tiny random checkpoints that see, with a tokenizer, a chat template and a processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
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


def _tiles(patch: int, kind: str = "Qwen2VLImageProcessor") -> dict[str, Any]:
    """Four to eight rows, each of 2 x 2 patches."""
    row = (2 * patch) ** 2
    return {
        "image_processor_type": kind,
        "size": {"shortest_edge": 4 * row, "longest_edge": 8 * row},
        "patch_size": patch,
    }


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
    "qwen2-vl": ("<|image_pad|>", _QWEN, _tiles(14)),
    "qwen2.5-vl": ("<|image_pad|>", _QWEN, _tiles(14)),
    "qwen3-vl": ("<|image_pad|>", _QWEN, _tiles(16)),
    "qwen3-vl-moe": ("<|image_pad|>", _QWEN, _tiles(16)),
    "qwen3.5": ("<|image_pad|>", _QWEN, _tiles(16)),
    "qwen3.5-moe": ("<|image_pad|>", _QWEN, _tiles(16)),
    "glm4v": ("<|image_pad|>", _QWEN, _tiles(14, "Glm4vImageProcessor")),
    "glm4.6v": ("<|image_pad|>", _QWEN, _tiles(14, "Glm46VImageProcessor")),
    "glm4v-moe": ("<|image_pad|>", _QWEN, _tiles(14, "Glm4vImageProcessor")),
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
        #: Tokens that the template writes around an image.
        self.around: tuple[list[int], list[int]] = ([], [])
        if "<|vision_start|>" in template:
            start, end = map(tokenizer.token_to_id, ("<|vision_start|>", "<|vision_end|>"))
            self.around = [start], [end]
        text = NESTED_KINDS[kind].settings["text_config"]
        fields = dict.fromkeys(("image_token_id", "image_token_index"), self.token_id)
        for name, around in zip(("start", "end"), self.around, strict=True):
            for part in ("vision", "image") if around else ():
                fields[f"{part}_{name}_token_id"] = around[0]
        golden = Golden(kind, text_config={**text, "vocab_size": VOCABULARY}, **fields)
        golden.save(folder)
        self._never_say(golden.model, folder)
        self.folder, self.model, self.tokenizer = folder, golden.model, tokenizer
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((DEMO / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        self._process = AutoImageProcessor.from_pretrained(folder, backend="pil")

    def _never_say(self, model: Any, folder: Path) -> None:
        """Let the token for images be unlikely: transformers takes one in a text for an image."""
        tensors = load_file(folder / "model.safetensors")
        head = next((x for x in tensors if x.endswith("lm_head.weight")), None)
        name = head or next(x for x in tensors if x.endswith("embed_tokens.weight"))
        tensors[name][self.token_id] = 0
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            model.get_output_embeddings().weight[self.token_id] = 0

    def prepared(self, image: Image.Image) -> dict[str, np.ndarray]:
        """What the processor makes of an image."""
        made = self._process(image, return_tensors="np")
        return {name: np.ascontiguousarray(value) for name, value in made.items()}

    def rows(self, image: Image.Image) -> int:
        """Tokens that stand for an image."""
        grid = self.prepared(image).get("image_grid_thw")
        return (_SIDE // 8) ** 2 if grid is None else int(grid.prod()) // 4

    def shown(self, image: Image.Image) -> str:
        """What the template writes for it, with a token for each row."""
        text = self.token * self.rows(image)
        return f"<|vision_start|>{text}<|vision_end|>" if self.around[0] else f"{text}\n"

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
                tokens = torch.tensor([ids])
                if "image_grid_thw" in tensors:
                    # By which transformers finds the positions of images.
                    tensors["mm_token_type_ids"] = (tokens == self.token_id).int()
                logits = self.model(input_ids=tokens, use_cache=False, **tensors).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]
