"""LoRA adapters in PEFT's layout, written without PEFT, and the dense weights that they stand for.

The layout is that of PEFT's `save_pretrained` (huggingface/peft, src/peft/utils/save_and_load.py):
tensors `base_model.model.MODULE.lora_A.weight` [r, in] and `lora_B.weight` [out, r]; of an
embedding `lora_embedding_A` [r, vocabulary] and `lora_embedding_B` [width, r].
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BASE = "base_model.model."


@dataclass
class Lora:
    """An adapter on some modules of a base."""

    folder: Path
    #: By module: A [r, in], B [out, r], and what their product is multiplied with.
    factors: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)
    #: By module: lengths of its outputs [out] (DoRA).
    lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    #: By module: the whole bias.
    biases: dict[str, torch.Tensor] = field(default_factory=dict)
    #: By module: the whole weight.
    whole: dict[str, torch.Tensor] = field(default_factory=dict)


def write_lora(
    folder: Path,
    base: Path,
    modules: dict[str, int],
    *,
    seed: int = 0,
    transposed: bool = False,
    scales: dict[str, float] | None = None,
    biases: tuple[str, ...] = (),
    whole: tuple[str, ...] = (),
    embedding: str = "",
    **config: Any,
) -> Lora:
    """An adapter with random factors.

    Args:
        folder: of the adapter.
        base: folder of its base.
        modules: beginnings of the base's names of tensors, without `.weight`, and ranks; a head
            that is the embedding has a name, too.
        seed: of the factors.
        transposed: the base's weights are [in, out].
        scales: by the last part of a module's name; others have alpha / r of the config.
        biases: modules whose bias it replaces.
        whole: modules that it brings itself (`modules_to_save`).
        embedding: which of the modules is an embedding.
        config: more fields of its config.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = _tensors(base)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    if whole:
        settings["modules_to_save"] = [name.rpartition(".")[2] for name in whole]
    made, tensors = Lora(folder), {}
    for module, rank in modules.items():
        shape = _like(stored, module).shape
        outputs, inputs = shape[::-1] if transposed else shape
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * 0.3
        scale = (scales or {}).get(module.rpartition(".")[2], settings["lora_alpha"] / rank)
        made.factors[module] = (a, b, scale)
        if module == embedding:
            tensors[f"{BASE}{module}.lora_embedding_A"] = b.t().contiguous()
            tensors[f"{BASE}{module}.lora_embedding_B"] = a.t().contiguous()
            continue
        tensors[f"{BASE}{module}.lora_A.weight"] = a
        tensors[f"{BASE}{module}.lora_B.weight"] = b
        if settings.get("use_dora"):
            made.lengths[module] = lengths = torch.rand(outputs, generator=generator) + 0.5
            tensors[f"{BASE}{module}.lora_magnitude_vector"] = lengths
    for module in biases:
        bias = torch.randn(stored[f"{module}.bias"].shape, generator=generator) * 0.3
        made.biases[module] = bias
        tensors[f"{BASE}{module}.base_layer.bias"] = bias
    for module in whole:
        like = _like(stored, module)
        weight = torch.randn(like.shape, generator=generator) * like.float().std()
        made.whole[module] = tensors[f"{BASE}{module}.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return made


def merge(base: Path, lora: Lora, folder: Path, *, transposed: bool = False) -> Path:
    """A checkpoint with the adapter's products added to the base's weights."""
    shutil.copytree(base, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if any(f"{module}.weight" not in tensors for module in lora.factors):
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            _untie(folder)
        for module, (a, b, scale) in lora.factors.items():
            name = f"{module}.weight"
            if name in tensors:
                delta = scale * (b.double() @ a.double())
                delta = delta.t() if transposed else delta
                moved = tensors[name].double() + delta
                if module in lora.lengths:
                    outputs = lora.lengths[module].double()
                    outputs = outputs if transposed else outputs[:, None]
                    moved *= outputs / moved.norm(dim=0 if transposed else 1, keepdim=True)
                tensors[name] = moved.to(tensors[name].dtype)
        for module, bias in lora.biases.items():
            if f"{module}.bias" in tensors:
                tensors[f"{module}.bias"] = bias.to(tensors[f"{module}.bias"].dtype)
        for module, weight in lora.whole.items():
            if f"{module}.weight" not in tensors:  # a head that is no longer the embedding
                _untie(folder)
            tensors[f"{module}.weight"] = weight.to(next(iter(tensors.values())).dtype)
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, {"format": "pt"})
    return folder


def _like(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A head that is the embedding has no tensor of its own in the base."""
    found = stored.get(f"{module}.weight")
    return stored["model.embed_tokens.weight"] if found is None else found


def _untie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def _tensors(base: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in base.glob("*.safetensors") for n, t in load_file(path).items()}
