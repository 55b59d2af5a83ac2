"""GGUF files: tensors under transformers' names, config.json and a tokenizer from the metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenpod.core.model_files import small_files
from tokenpod.models.checkpoints.source import copy_files
from tokenpod.models.checkpoints.writer import Planned
from tokenpod.models.convert.gguf_config import ARCHITECTURES, Architecture, Metadata, config_of
from tokenpod.models.convert.gguf_parts import parts_of, read_parts

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PARTS = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: Tensors that config.json says, or that nothing reads.
_ROTATION = "rope_freqs.weight"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Ways of splitting texts that transformers knows by these names.
_SPLITS = ("gpt2", "gpt-2", "llama3", "llama-v3", "llama-bpe", "smaug-bpe", "tekken", "qwen2")
#: Numbers that are made at once.
_PIECE = 1 << 24


class Gguf:
    """A GGUF model; the tensors are read where its files are mapped.

    Args:
        path: of its file, or of one of several.
        dtype: what quantised numbers become.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        values, tensors = read_parts(path)
        self._path, self._dtype = parts_of(path)[0], dtype
        self._data = Metadata(values, path)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        if self._data.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            text = f"architecture {self._data.architecture} is not supported (supported: {known})"
            raise self._data.error(text)
        self._about = ARCHITECTURES[self._data.architecture]

    def tensors(self) -> Sequence[Planned]:
        """All but the rotation's factors."""
        names = [name for name in self._tensors if name != _ROTATION]
        return [self._planned(name, self._tensors[name]) for name in names]

    def write_small_files(self, folder: Path) -> None:
        """config.json, and what transformers makes of the tokenizer and chat template."""
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise self._data.error("it has no token_embd.weight")
        rotation = self._tensors.get(_ROTATION)
        config = config_of(
            self._data,
            int(embedding.shape[-1]),
            tied="output.weight" not in self._tensors,
            factors=None if rotation is None else np.asarray(rotation.data, np.float32),
        )
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        beside = [name for name in small_files(self._path.parent) if _is_tokenizers(name)]
        if any(name in ("tokenizer.json", "tokenizer.model") for name in beside):
            copy_files(self._path.parent, beside, folder)
        else:
            self._write_tokenizer(folder)

    def _write_tokenizer(self, folder: Path) -> None:
        from transformers.models.auto import AutoTokenizer

        kind, split = (self._data.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind == "gpt2" and split not in _SPLITS:
            # The library would take GPT-2's way of splitting, and texts would have other tokens.
            text = f"its tokenizer splits texts by {split!r}, which is not supported"
            raise self._data.error(f"{text}: put the model's tokenizer.json beside it")
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(self._path.parent), gguf_file=self._path.name, local_files_only=True
            )
            tokenizer.save_pretrained(str(folder))
        except MemoryError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise self._data.error(f"its tokenizer ({kind}) can't be converted ({text})") from None

    def _planned(self, name: str, tensor: Any) -> Planned:
        kind = tensor.tensor_type.name
        if kind not in _PLAIN and kind not in block_formats():
            known = ", ".join([*_PLAIN, *block_formats()])
            raise self._data.error(f"{name} is {kind}, which is not supported (supported: {known})")
        shape = tuple(int(size) for size in reversed(tensor.shape))
        dtype = _PLAIN.get(kind, self._dtype)
        finish = self._finish(name, self._about)
        return Planned(
            self._name(name), dtype, shape, lambda: finish(_numbers(tensor, kind, dtype, shape))
        )

    def _name(self, name: str) -> str:
        """transformers' name; ModelError if there is none."""
        found = _LAYER.fullmatch(name)
        parts = {**_PARTS, **(_SANDWICH if self._about.sandwich else {})}
        if found and found[2] in parts:
            return f"model.layers.{found[1]}.{parts[found[2]]}.{found[3]}"
        if name not in _NAMES:
            raise self._data.error(f"{self._data.architecture} has no tensor {name}")
        return _NAMES[name]

    def _finish(self, name: str, about: Architecture) -> Callable[[torch.Tensor], torch.Tensor]:
        """What undoes the changes that a tensor had on its way into the file."""
        if about.offset and name.endswith("norm.weight"):
            return lambda norm: norm - about.offset
        part = found[2] if (found := _LAYER.fullmatch(name)) else ""
        if about.permuted and part in ("attn_q", "attn_k"):
            heads = self._data.integer("attention.head_count")
            if part == "attn_k":
                heads = self._data.get("attention.head_count_kv") or heads
            return lambda rows: _in_halves(rows, heads)
        return lambda tensor: tensor


def _is_tokenizers(name: str) -> bool:
    """Whether a model's small file belongs to its tokenizer."""
    return name not in ("config.json", "generation_config.json")


def _in_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in which i and i + D/2 are rotated together, made of neighbouring pairs."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _numbers(tensor: Any, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers of a tensor; those of blocks are made a few rows at a time."""
    stored = np.ascontiguousarray(tensor.data)
    if kind in _PLAIN:
        return torch.from_numpy(stored.reshape(-1).view(np.uint8).copy()).view(dtype).view(shape)
    from gguf.quants import dequantize

    rows = stored.reshape(-1, stored.shape[-1])
    made = torch.empty((len(rows), shape[-1]), dtype=dtype)
    step = max(_PIECE // shape[-1], 1)
    for start in range(0, len(rows), step):
        # A damaged file's scales may be infinite: then so are its numbers.
        with np.errstate(all="ignore"):
            piece = dequantize(rows[start : start + step], tensor.tensor_type)
        made[start : start + step] = torch.from_numpy(piece)
    return made.view(shape)


@cache
def block_formats() -> tuple[str, ...]:
    """Names of the formats whose numbers the gguf package makes floats of."""
    import gguf

    return tuple(kind.name for kind in gguf.GGMLQuantizationType if _is_read(kind))


def _is_read(kind: Any) -> bool:
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return kind.name not in _PLAIN
