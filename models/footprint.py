"""What a model takes, told by a process of its own: `python -m tokenpod.models.footprint FOLDER`.

The weight tables that load a model also say how large it is, so the two can't disagree. They come
with torch, which the service and its commands do without: hence the process.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenpod.engine.capacity import Footprint
from tokenpod.models.checkpoint import Checkpoint, check
from tokenpod.models.config import DecoderConfig
from tokenpod.models.families import FAMILIES
from tokenpod.models.load import ModelError, read_config
from tokenpod.models.weights import Dim, Source, Split, Weight, expand

#: Axes that ranks divide evenly, but for those counted in heads.
_AXES = {
    Dim.INTERMEDIATE: "intermediate features",
    Dim.EXPERT_INTERMEDIATE: "intermediate features of an expert",
}


def main() -> int:
    """Print the footprint of the model in a folder as JSON, or one line about what is wrong."""
    try:
        footprint = footprint_of(Path(sys.argv[1]))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(footprint).decode())
    return 0


def footprint_of(folder: Path) -> Footprint:
    """The footprint of the model in `folder`, which needs no more than its config.json.

    Where its safetensors files are there too, their tensors are checked against it. Raises
    ModelError for what could not be served.
    """
    config = read_config(folder)
    table = next(f.weights for f in FAMILIES if config.architecture in f.architectures)
    there = any(folder.glob("*.safetensors"))
    if there:
        with Checkpoint(folder) as checkpoint:
            if "lm_head.weight" not in checkpoint:
                config = dataclasses.replace(config, tied_head=True)
            check(checkpoint, expand(table(config), config.layers), config)
    return _footprint(config, expand(table(config), config.layers), from_tensors=there)


def _footprint(config: DecoderConfig, weights: list[Weight], *, from_tensors: bool) -> Footprint:
    parts = [(source, weight.split) for weight in weights for source in weight.sources]
    numbers = dict.fromkeys(("whole", "divided", "key_value"), 0)
    for source, split in parts:
        numbers[_kind(source, split)] += math.prod(dim.length(config) for dim in source.shape)
    return Footprint(
        architecture=config.architecture,
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype else None,
        from_tensors=from_tensors,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=_widest(config),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        divisible={"attention heads": config.heads, **_divided_axes(config, parts)},
        **numbers,
    )


def _kind(source: Source, split: Split) -> str:
    if split.value is None:
        return "whole"
    return "key_value" if source.shape[split.value] is Dim.KEY else "divided"


def _divided_axes(config: DecoderConfig, parts: Iterable[tuple[Source, Split]]) -> dict[str, int]:
    axes = {source.shape[split.value] for source, split in parts if split.value is not None}
    return {name: dim.length(config) for dim, name in _AXES.items() if dim in axes}


def _widest(config: DecoderConfig) -> int:
    experts = config.experts
    if experts is None:
        return config.intermediate_size
    sparse = experts.intermediate_size * experts.routing.per_token
    return sparse if len(experts.layers) == config.layers else max(sparse, config.intermediate_size)


if __name__ == "__main__":
    sys.exit(main())
