"""The memory that a model takes: `python -m tokenpod.models.footprint FOLDER` prints it.

The weight tables that load a model also say how large it is, so the two can't disagree. They come
with torch, which the service and its commands do without: hence the process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from tokenpod.core.model_size import Footprint, Portion
from tokenpod.core.windows import longest
from tokenpod.kernels.backends.registry import operations_for
from tokenpod.models.adapters.targets import (
    copied_numbers,
    scale_numbers,
    slot_numbers,
    vocabulary_numbers,
)
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.eagle import is_eagle, read_eagle, weights_of
from tokenpod.models.folder import is_native, read_layout, sees_images, tier_of
from tokenpod.models.formats import AsStored, as_stored
from tokenpod.models.load import check_alone
from tokenpod.models.medusa import MOST_POSITIONS, is_medusa, open_medusa, read_medusa
from tokenpod.models.mtp import mtp_layout
from tokenpod.models.specs.head_spec import HeadSpec
from tokenpod.models.specs.layout import Layout
from tokenpod.models.tier.errors import NotServed
from tokenpod.models.weights.shard import WHOLE, Shard

#: One for each size of numbers that a model may have.
_DTYPES = (torch.float32, torch.bfloat16)


def main() -> int:
    """Print the footprint of the model in a folder as JSON, or one line about what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantize")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--max-total-tokens", type=int)
    parser.add_argument("--mtp", action="store_true", help="its layer that predicts further tokens")
    parser.add_argument("--heads", type=int, help="of Medusa heads, how many are used")
    parser.add_argument("--drafts", type=int, default=0, help="of a row, that may be wrong")
    asked = parser.parse_args()
    try:
        footprint = footprint_of(
            asked.folder,
            asked.quantize,
            head=asked.quantize_head,
            max_total_tokens=asked.max_total_tokens,
            mtp=asked.mtp,
            heads=asked.heads,
            drafts=asked.drafts,
        )
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(footprint).decode())
    return 0


def footprint_of(
    folder: Path,
    quantize: str | None = None,
    *,
    head: bool = False,
    max_total_tokens: int | None = None,
    mtp: bool = False,
    heads: int | None = None,
    drafts: int = 0,
) -> Footprint:
    """The footprint of the model in `folder`, which needs no more than its config.json.

    With `mtp` that of its layer that predicts further tokens, beside it; with `heads` that of
    so many Medusa heads, if those are there, whose config.json does not say how large they are.
    `drafts`: so many of a row may be wrong, which states of rows have room for.

    Where its safetensors files are there too, their tensors are checked against it. Raises
    ModelError for what could not be served, with its products in the format `quantize`, and with
    `head` the head too. `max_total_tokens`: the longest text that is served, which some models
    computed by transformers must be told.
    """
    if is_eagle(folder):
        return _of_head(folder)
    if heads is not None and is_medusa(folder):
        return _of_medusa(folder, heads)
    if not is_native(folder):
        if mtp:
            raise ModelError(f"{folder}: transformers computes it, without layers that predict")
        return _through_transformers(folder, quantize, max_total_tokens)
    if not any(folder.glob("*.safetensors")):
        layout = read_layout(folder, None, None, quantize, quantize_head=head)
        if mtp:
            return _of_mtp(folder, layout)
        return _with_tower(folder, _footprint(layout, drafts), max_total_tokens)
    with Checkpoint(folder) as checkpoint:
        layout = read_layout(folder, checkpoint, None, quantize, quantize_head=head)
    if mtp:
        return _of_mtp(folder, layout, checkpoint)
    return _with_tower(folder, _footprint(layout, drafts, checkpoint), max_total_tokens)


def _with_tower(folder: Path, found: Footprint, max_total_tokens: int | None) -> Footprint:
    """The same, and what the tower of images takes, where the folder says all about it."""
    if not sees_images(folder):
        return found
    # Not above: transformers takes its time to load.
    from tokenpod.models.towers.tower import tower_size

    rows = min(max_total_tokens or found.max_positions, found.max_positions)
    tower = tower_size(folder, rows)
    return msgspec.structs.replace(found, tower_numbers=tower.weights, tower_working=tower.working)


def _of_head(folder: Path) -> Footprint:
    """Of an EAGLE-3 head, but for an embedding of its own, which few have."""
    spec = read_eagle(folder)
    decoder = spec.decoder
    numbers = sum(math.prod(weight.shape) for weight in weights_of(spec, ""))
    return Footprint(
        architecture=spec.architecture,
        dtype=str(decoder.dtype).removeprefix("torch.") if decoder.dtype else None,
        from_tensors=False,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.widest,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        portions={1: Portion(numbers, sum(kv.numbers for kv in spec.kv_layouts))},
    )


def _of_medusa(folder: Path, heads: int) -> Footprint:
    """Of the first Medusa heads in a folder; each rank has all of them."""
    with open_medusa(folder) as checkpoint:
        spec = read_medusa(folder, checkpoint)
    return Footprint(
        architecture=spec.architecture,
        dtype=None,
        from_tensors=True,
        hidden_size=spec.width,
        intermediate_size=spec.width,
        vocab_size=spec.vocab_size,
        max_positions=MOST_POSITIONS,
        portions={1: Portion(WHOLE.numbers(spec.first(heads)), 0)},
    )


def _of_mtp(folder: Path, model: Layout, there: Checkpoint | None = None) -> Footprint:
    """Of a layer that predicts further tokens, which each rank has all of."""
    layout = mtp_layout(folder, model)
    portion = Portion(
        WHOLE.numbers(layout.weights), sum(kv.numbers for kv in HeadSpec(layout.spec).kv_layouts)
    )
    portions = {1: _with_formats(portion, layout, 1, there)}
    whole = _footprint(model)
    return msgspec.structs.replace(whole, portions=portions, repeated=0, states={})


def _through_transformers(
    folder: Path, quantize: str | None, max_total_tokens: int | None
) -> Footprint:
    """Of a model of another family: by its class's own weights, whatever the files hold."""
    tier = tier_of(folder, max_total_tokens)
    spec = tier.spec
    check_alone(spec, WHOLE, quantize)
    states = {}
    if spec.own_state is not None:
        try:
            states = {dtype.itemsize: tier.state_of(dtype) for dtype in _DTYPES}
        except NotServed as reason:
            raise ModelError(
                f"{spec.architecture} is computed by transformers, and what it keeps of a sequence"
                f" is known once it is loaded ({reason}): it can't be sized before"
            ) from None
    elif not spec.kv_layouts:
        raise ModelError(
            f"{spec.architecture} is computed by transformers, and what it keeps of a token is "
            "known once it is loaded: it can't be sized before"
        )
    return Footprint(
        architecture=spec.architecture,
        dtype=str(spec.dtype).removeprefix("torch.") if spec.dtype else None,
        from_tensors=False,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.widest,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        portions={1: Portion(tier.numbers, sum(kv.numbers for kv in spec.kv_layouts))},
        states={size: state for size, state in states.items() if state is not None},
    )


def _footprint(layout: Layout, drafts: int = 0, there: Checkpoint | None = None) -> Footprint:
    """`there`: the checkpoint; None: only its config is known."""
    spec, portions = replace(layout.spec, drafts=drafts), dict(_portions(layout, there))
    states = {dtype.itemsize: spec.own_state_of(dtype.itemsize) for dtype in _DTYPES}
    return Footprint(
        architecture=spec.architecture,
        dtype=str(spec.dtype).removeprefix("torch.") if spec.dtype else None,
        from_tensors=there is not None,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.widest,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        portions=portions,
        quantize=layout.reader.name if layout.reader else "none",
        repeated=portions[1].numbers - layout.parameters,
        states={size: state for size, state in states.items() if state is not None},
        window=longest(spec.kv_windows) if not spec.state_layouts else None,
    )


def _portions(layout: Layout, there: Checkpoint | None) -> Iterator[tuple[int, Portion]]:
    for world in layout.spec.rank_counts:
        shard = Shard(0, world)
        try:
            local = layout.spec.on_rank(shard)
        except ModelError:
            continue
        fixed = slot_numbers(layout.weights, shard, 0)
        caches = zip(local.kv_layouts, local.kv_windows, strict=True)
        in_windows = [kv for kv, window in caches if window is not None]
        portion = Portion(
            shard.numbers(layout.weights),
            sum(kv.numbers for kv in local.kv_layouts),
            sum(kv.scales for kv in local.kv_layouts),
            max((kv.numbers for kv in local.kv_layouts), default=0),
            sum(kv.numbers for kv in in_windows),
            sum(kv.scales for kv in in_windows),
            adapter_numbers=(slot_numbers(layout.weights, shard, 1) - fixed, fixed),
            adapter_outputs=scale_numbers(layout.weights, shard),
            copied_numbers=copied_numbers(layout.weights, shard),
            vocabulary_numbers=vocabulary_numbers(layout.weights, shard, 1),
            expansion=local.expansion,
        )
        yield world, _with_formats(portion, layout, world, there)


def _with_formats(
    portion: Portion, layout: Layout, world: int, there: Checkpoint | None
) -> Portion:
    """The same, and what weights of fewer bits take."""
    ops = operations_for(torch.device("cpu"))
    stored = as_stored(layout.spec, layout.reader, there, torch.float32, ops)
    if isinstance(stored, AsStored):
        narrow = [weight for weight in layout.weights if stored.kind(weight) is not None]
        numbers = Shard(0, world).numbers(narrow)
        portion = msgspec.structs.replace(portion, narrow_numbers=numbers)
    reader = layout.reader
    if reader is None:
        return portion
    quantised = [
        # A rank whose part does not begin with the weight cuts groups, if any does.
        reader.quantised(weight, Shard(min(1, world - 1), world))
        for weight in layout.weights
        if reader.quantises(weight)
    ]
    return msgspec.structs.replace(
        portion,
        quantised_numbers=sum(each.numbers for each in quantised),
        quantised_bytes=sum(each.size for each in quantised),
    )


if __name__ == "__main__":
    sys.exit(main())
