"""Tiny random checkpoints that see, with a tokenizer, a chat template and a processor."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from support.checkpoints.demo import DEMO
from support.checkpoints.golden import Golden, golden_config
from support.checkpoints.golden_kinds import KINDS, NESTED_KINDS, PREFIX_KINDS
from tokenpod.core.image_processors import ImageProcessor
from tokenpod.core.images import SIGHTS
from tokenpod.service.images.expansions import Layout, rows_of
from tokenpod.service.images.image_reader import ImageTokens
from tokenpod.service.images.image_rows import layout_of

#: Of the embedding's table: the demo's tokens and those below.
VOCABULARY = 4224
_MARKS = (
    *("<image>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    *("<img>", "</img>", "[IMG_BREAK]", "[IMG_END]", "<|IMG_PATCH|>", "<global-img>"),
    *("<fake_token_around_image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *(f"<row_{line}_col_{column}>" for line in (1, 2) for column in (1, 2)),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<|IMG_LINE_BREAK|>"),
    *(f"<|img_row_{line}_col_{column}|>" for line in (1, 2) for column in (1, 2, 3, 4)),
    *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
)
_LLAVA = """{% for message in messages %}{{ message.role + ': ' }}{% if message.content is string
 %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image'
 %}{{ '<image>\\n' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif
 %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
_QWEN = _LLAVA.replace("<image>\\n", "<|vision_start|><|image_pad|><|vision_end|>")
_MEDIA = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
_KIMI = _LLAVA.replace("<image>\\n", _MEDIA)
_SIDE = 16


def _tiles(patch: int, kind: str = "Qwen2VLImageProcessor") -> dict[str, Any]:
    """Four to eight rows, each of 2 x 2 patches."""
    row = (2 * patch) ** 2
    return {
        "image_processor_type": kind,
        "size": {"shortest_edge": 4 * row, "longest_edge": 8 * row},
        "patch_size": patch,
    }


#: Tiles of 16 x 16 pixels.
_TILE = {"height": _SIDE, "width": _SIDE}
_CUT = {"size": _TILE, "crop_size": _TILE}
_PINPOINTS = [[16, 32], [32, 16], [32, 32], [48, 16]]
_LINED = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": _SIDE}}
_CROPS = {"size": _TILE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_CROPS |= {"image_processor_type": "GotOcr2ImageProcessor"}
_SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": _TILE}
_FITTING = {"image_processor_type": "Cohere2VisionImageProcessorFast", "size": _TILE}

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
    "aya-vision": ("<|IMG_PATCH|>", _LLAVA, _CROPS),
    "cohere2-vision": ("<|IMG_PATCH|>", _LLAVA.replace("<image>", "<|IMG_PATCH|>"), _FITTING),
    "gemma3-images": (
        "<image_soft_token>",
        _LLAVA.replace("<image>\\n", "<start_of_image>"),
        {"image_processor_type": "Gemma3ImageProcessor", "size": _TILE},
    ),
    "gemma4-images": (
        "<image_soft_token>",
        _LLAVA.replace("<image>\\n", "<image_soft_token>"),
        {
            "image_processor_type": "Gemma4ImageProcessor",
            **{"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        },
    ),
    "idefics3": ("<image>", _LLAVA, {"image_processor_type": "Idefics3ImageProcessor", **_LINED}),
    "internvl": ("<image>", _LLAVA, _CROPS),
    "kimi-k2.5": ("<|media_pad|>", _KIMI, {"image_processor_type": "Kimi_K25ImageProcessor"}),
    "kimi-k2.5-published": (
        "<|media_pad|>",
        _KIMI,
        {"media_proc_cfg": {"in_patch_limit": 8, "patch_size": 14, "merge_kernel_size": 2}},
    ),
    "lfm2-vl": (
        "<image>",
        _LLAVA,
        {
            "image_processor_type": "Lfm2VlImageProcessorFast",
            **{"encoder_patch_size": 8, "tile_size": 32, "max_tiles": 4},
            **{"min_image_tokens": 1, "max_image_tokens": 4, "max_pixels_tolerance": 0.9},
        },
    ),
    "lighton-ocr": (
        "<image>",
        _LLAVA,
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 224}},
    ),
    "llava-next": (
        "<image>",
        _LLAVA,
        {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            **_CUT,
            "size": {"shortest_edge": _SIDE},
        },
    ),
    "llava-onevision": (
        "<image>",
        _LLAVA,
        {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _PINPOINTS,
            "size": _TILE,
        },
    ),
    "mistral3": (
        "<image>",
        _LLAVA,
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 224}},
    ),
    "paligemma": ("<image>", _LLAVA, _SIGLIP),
    "paligemma2": ("<image>", _LLAVA, _SIGLIP),
    "smolvlm": ("<image>", _LLAVA, {"image_processor_type": "SmolVLMImageProcessor", **_LINED}),
}


SEEING_KINDS = (*_KINDS,)
_KINDS_OF_GOLDEN = {**KINDS, **NESTED_KINDS, **PREFIX_KINDS}
#: Settings of configs besides those of text alone.
_MORE: dict[str, dict[str, Any]] = {
    "gemma3-images": {"tie_word_embeddings": False},
    "paligemma": {"tie_word_embeddings": False, "vocab_size": VOCABULARY},
    "paligemma2": {"tie_word_embeddings": False, "vocab_size": VOCABULARY},
    "gemma4-images": {
        "vision_config": {
            **NESTED_KINDS["gemma4-images"].settings["vision_config"],
            **{"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2},
            **{"position_embedding_size": 64, "rope_parameters": None},
        },
    },
    "kimi-k2.5": {"projection_hidden_size": 32},
    **{kind: {"image_grid_pinpoints": _PINPOINTS} for kind in ("llava-next", "llava-onevision")},
}
_MORE_OF_TEXT: dict[str, dict[str, Any]] = {
    "gemma3-images": {"tie_word_embeddings": False},
    "paligemma": {"tie_word_embeddings": False},
    "paligemma2": {"tie_word_embeddings": False},
    "gemma4-images": {
        "use_bidirectional_attention": "vision",
        "sliding_window": 80,
        "vocab_size_per_layer_input": VOCABULARY,
    },
}
#: Kinds whose processor lies within that of the whole, as newer files have it.
_NESTED = ("gemma3-images", "gemma4-images")


#: Kinds that their own project publishes otherwise than transformers saves them.
PUBLISHED = "-published"


def write_processor(kind: str, folder: Path) -> None:
    """All that the decoding of images reads of the folder of such a kind."""
    base = kind.removesuffix(PUBLISHED)
    config = {**golden_config(base), **_MORE.get(base, {})}
    _write(kind, folder, config)


def _write(kind: str, folder: Path, config: dict[str, Any]) -> None:
    if kind.endswith(PUBLISHED):
        config["architectures"] = ["KimiK25ForConditionalGeneration"]
        config["media_placeholder_token_id"] = config.pop("image_token_id")
    (folder / "config.json").write_text(json.dumps(config))
    processor = _KINDS[kind][2]
    if kind in _NESTED:
        whole = {"image_processor": processor, "processor_class": "AnyProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))


class Seeing:
    """A checkpoint in a folder, and what transformers makes of it.

    Args:
        kind: one of those of the golden checkpoints.
        folder: for it alone.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.token, template, _ = _KINDS[kind]
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
        self.token_id = tokenizer.token_to_id(self.token)
        assert self.token_id < VOCABULARY
        base = kind.removesuffix(PUBLISHED)
        text = _KINDS_OF_GOLDEN[base].settings["text_config"]
        fields = dict.fromkeys(("image_token_id", "image_token_index"), self.token_id)
        for name, mark in (("boi", "<start_of_image>"), ("eoi", "<end_of_image>")):
            token = tokenizer.token_to_id(mark)
            fields |= dict.fromkeys((f"{name}_token_id", f"{name}_token_index"), token)
        if "<|vision_start|>" in template:
            for name in "start", "end":
                token = tokenizer.token_to_id(f"<|vision_{name}|>")
                fields |= dict.fromkeys(
                    (f"vision_{name}_token_id", f"image_{name}_token_id"), token
                )
        more = {**fields, **_MORE.get(base, {})}
        text = {**text, "vocab_size": VOCABULARY, **_MORE_OF_TEXT.get(base, {})}
        golden = Golden(base, text_config=text, **more)
        golden.save(folder)
        self._never_say(golden.model, folder)
        self.folder, self.model, self.tokenizer = folder, golden.model, tokenizer
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((DEMO / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        _write(kind, folder, json.loads((folder / "config.json").read_text()))
        self._process = ImageProcessor(folder, self.model.config)
        self.config = json.loads((folder / "config.json").read_text())
        self.sight = SIGHTS[self.config["architectures"][0]]
        tokens = ImageTokens.of(self.config, tokenizer.id_to_token)
        assert tokens is not None
        self.tokens = tokens
        #: All tokens of a prompt see each other.
        self.sees_prompts = self.config["architectures"][0].startswith("PaliGemma")
        #: What the template writes behind an image.
        self._behind = "\n" if "\\n' }}{% else" in template else ""

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
        return self._process(np.asarray(image))

    def layout(self, image: Image.Image) -> Layout:
        """How it stands in a prompt."""
        return layout_of(self.sight.rows, self.model.config, self.prepared(image), {})

    def rows(self, image: Image.Image) -> int:
        """Tokens that stand for an image."""
        return rows_of(self.layout(image))

    def shown(self, image: Image.Image) -> str:
        """What the template writes for it, with a token for each row."""
        text = self.tokens.expansion(self.layout(image))
        return self.tokens.opening + text + self.tokens.closing + self._behind

    def greedy(self, prompt: list[int], images: list[Image.Image], count: int) -> list[int]:
        """So many tokens by transformers, each from the whole text anew.

        Args:
            prompt: with one token for each row of each image.
        """
        tensors: dict[str, torch.Tensor] = {}
        if images:
            takes = inspect.signature(self.model.forward).parameters.keys()
            made = [self.prepared(image) for image in images]
            tensors = {
                name: torch.cat(_padded([torch.from_numpy(each[name]) for each in made]))
                for name in made[0]
                if name in takes
            }
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens = torch.tensor([ids])
                if images:
                    # By which transformers finds the positions of images, and what they see.
                    kinds = {"mm_token_type_ids", "token_type_ids"} & takes
                    tensors |= dict.fromkeys(kinds, (tokens == self.token_id).int())
                if self.sees_prompts:
                    # 0 is what sees itself.
                    tensors["token_type_ids"] = (torch.arange(len(ids)) >= len(prompt))[None].int()
                logits = self.model(input_ids=tokens, use_cache=False, **tensors).logits
                ids.append(int(logits[0, -1].argmax()))
        return ids[len(prompt) :]


def _padded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """With zeros behind, but for the first axis, so that they can be joined."""
    most = [max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True)]
    found = []
    for each in tensors:
        larger = each.new_zeros((len(each), *most))
        larger[tuple(map(slice, each.shape))] = each
        found.append(larger)
    return found
