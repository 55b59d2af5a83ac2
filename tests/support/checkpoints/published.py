"""A quantised checkpoint of a tiny model, and the dense one of what its numbers stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.checkpoints.packers import Module, Source
from tokenpod.kernels.operations.weight import LinearWeight, StackedWeight
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.folder import read_layout
from tokenpod.models.formats import bytes_needed
from tokenpod.models.layers.linear import Weights
from tokenpod.models.layers.reading import read_weights
from tokenpod.models.weights.shard import Shard

CPU = torch.device("cpu")
#: 384 features on two ranks are 192, which ends inside a block of 128; on four they are 96.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}

Make = Callable[[Source, int, int], Module]


@dataclass
class Pair:
    """Two folders of one model."""

    packed: Path
    dense: Path


def make_pair(
    at: Path,
    quantisation: dict[str, Any] | None,
    module: Make,
    *,
    left: Callable[[str], bool] = lambda name: False,
    files: dict[str, Any] | None = None,
    **config: Any,
) -> Pair:
    """Modules whose names `left` says yes to stay dense; `files` lie beside config.json."""
    pair = Pair(at / "packed", at / "dense")
    for folder in (pair.packed, pair.dense):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG | config))
    source, packed, dense = Source(), {}, {}
    for weight in read_layout(pair.dense, None).weights:
        for part in weight.sources:
            name, shape = part.name, part.stored_shape
            if name in dense:
                continue  # rows of a fused tensor that was made before
            base = name.removesuffix(".weight")
            linear = len(shape) == 2 and base != "model.embed_tokens"
            if linear and base != "lm_head" and not base.endswith("gate") and not left(base):
                made = module(source, *shape)
                packed |= {base + end: tensor for end, tensor in made.tensors.items()}
                dense[name] = made.weight
            else:
                dense[name] = torch.randn(shape, generator=source.generator) * 0.1
                packed[name] = dense[name]
    save_file(packed, pair.packed / "model.safetensors")
    save_file(dense, pair.dense / "model.safetensors")
    if quantisation is not None:
        text = json.dumps(CONFIG | config | {"quantization_config": quantisation})
        (pair.packed / "config.json").write_text(text)
    for name, content in (files or {}).items():
        (pair.packed / name).write_text(json.dumps(content))
    return pair


def read(folder: Path, shard: Shard, **more: Any) -> Weights:
    """A rank's weights; what they take is what was said before."""
    with Checkpoint(folder) as checkpoint:
        layout = read_layout(folder, checkpoint, **more)
        weights = read_weights(
            checkpoint,
            layout.weights,
            dtype=torch.float32,
            device=CPU,
            progress=lambda done, total: None,
            shard=shard,
            reader=layout.reader,
        )
        held = sum(weight.nbytes for weight in weights.values())
        needed = bytes_needed(layout.weights, shard, torch.float32, layout.reader)
    # Rows in another order may leave a block a scale for each.
    assert 0.93 * needed <= held <= 1.01 * needed, (held, needed)
    return weights


def dense_of(weight: torch.Tensor | LinearWeight | StackedWeight) -> torch.Tensor:
    """Its numbers, as floats."""
    if isinstance(weight, StackedWeight):
        return weight.dequantised(torch.float32)
    if isinstance(weight, torch.Tensor):
        return weight
    return torch.cat(
        [
            part if isinstance(part, torch.Tensor) else part.dequantised(torch.float32)
            for part in weight.parts
        ]
    )
