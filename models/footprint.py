"""What a model takes, told by a process of its own: `python -m tokenpod.models.footprint FOLDER`.

The weight tables that load a model also say how large it is, so the two can't disagree. They come
with torch, which the service and its commands do without: hence the process.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenpod.core.capacity import Footprint, Portion
from tokenpod.models.checkpoint import Checkpoint, check
from tokenpod.models.config import DecoderConfig
from tokenpod.models.families import FAMILIES
from tokenpod.models.load import ModelError, read_config
from tokenpod.models.share import Share
from tokenpod.models.weights import Weight, expand


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
    return Footprint(
        architecture=config.architecture,
        dtype=str(config.dtype).removeprefix("torch.") if config.dtype else None,
        from_tensors=from_tensors,
        layers=config.layers,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=_widest(config),
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        portions=dict(_portions(config, weights)),
    )


def _portions(config: DecoderConfig, weights: list[Weight]) -> Iterator[tuple[int, Portion]]:
    for world in range(1, config.heads + 1):
        share = Share(0, world)
        try:
            local = share.config(config)
        except ModelError:
            continue
        yield world, Portion(share.numbers(weights, config), local.kv_heads)


def _widest(config: DecoderConfig) -> int:
    experts = config.experts
    if experts is None:
        return config.intermediate_size
    sparse = experts.intermediate_size * experts.routing.per_token
    return sparse if len(experts.layers) == config.layers else max(sparse, config.intermediate_size)


if __name__ == "__main__":
    sys.exit(main())
