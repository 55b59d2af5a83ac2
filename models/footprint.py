"""What a model takes, told by a process: `python -m tokenpod.models.footprint FOLDER [FORMAT]`.

The weight tables that load a model also say how large it is, so the two can't disagree. They come
with torch, which the service and its commands do without: hence the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenpod.core.capacity import Footprint, Portion
from tokenpod.models.checkpoint import Checkpoint
from tokenpod.models.formats import check_format
from tokenpod.models.load import Layout, ModelError, read_config, read_layout
from tokenpod.models.shard import Shard


def main() -> int:
    """Print the footprint of the model in a folder as JSON, or one line about what is wrong."""
    folder, *formats = sys.argv[1:]
    try:
        footprint = footprint_of(Path(folder), *formats)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(footprint).decode())
    return 0


def footprint_of(folder: Path, quantize: str | None = None) -> Footprint:
    """The footprint of the model in `folder`, which needs no more than its config.json.

    Where its safetensors files are there too, their tensors are checked against it. Raises
    ModelError for what could not be served, with its products in the format `quantize`.
    """
    check_format(read_config(folder), quantize)
    if not any(folder.glob("*.safetensors")):
        return _footprint(read_layout(folder, None), from_tensors=False)
    with Checkpoint(folder) as checkpoint:
        return _footprint(read_layout(folder, checkpoint), from_tensors=True)


def _footprint(layout: Layout, *, from_tensors: bool) -> Footprint:
    spec = layout.spec
    return Footprint(
        architecture=spec.architecture,
        dtype=str(spec.dtype).removeprefix("torch.") if spec.dtype else None,
        from_tensors=from_tensors,
        layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.widest,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        portions=dict(_portions(layout)),
    )


def _portions(layout: Layout) -> Iterator[tuple[int, Portion]]:
    for world in range(1, layout.spec.heads + 1):
        shard = Shard(0, world)
        try:
            local = shard.config(layout.spec)
        except ModelError:
            continue
        products = [weight for weight in layout.weights if weight.multiplied]
        yield (
            world,
            Portion(
                numbers=shard.numbers(layout.weights),
                kv_numbers=local.kv.numbers,
                product_numbers=shard.numbers(products),
                product_rows=sum(shard.shape(s)[0] for each in products for s in each.sources),
            ),
        )


if __name__ == "__main__":
    sys.exit(main())
