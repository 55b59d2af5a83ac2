"""Weights from a checkpoint's tensors: merged, cast, and divided among ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.kernels.products.formats.grouped import GroupedWeight
from tokenpod.models.checkpoints.checkpoint import Checkpoint, WeightReader
from tokenpod.models.layers.linear import Weights
from tokenpod.models.weights import mxfp4
from tokenpod.models.weights.later import Later
from tokenpod.models.weights.memory import use_large_pages
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import HEAD, Source, Weight

Progress = Callable[[int, int], None]


def read_weights(
    checkpoint: Checkpoint,
    weights: list[Weight],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    shard: Shard = WHOLE,
    reader: WeightReader | None = None,
    later: Later | None = None,
) -> Weights:
    """Each weight in `dtype` on `device`, by our name; one weight at a time twice in memory.

    Weights that `reader` quantises are read by it instead. Of what ranks divide only this rank's
    shard is read, except where a format needs more for its scales. `progress` gets the bytes
    read from the files so far, and in all. What `later` may read is left to it.
    """
    sizes = [_stored_bytes(checkpoint, weight, shard, reader) for weight in weights]
    total, done = sum(sizes), 0
    progress(done, total)
    loaded: Weights = {}

    one = threading.Lock()

    def read(weight: Weight, target: torch.Tensor, size: int) -> None:
        nonlocal done
        _fill(target, checkpoint, weight, shard)
        with one:
            done += size
            progress(done, total)

    for weight, size in zip(weights, sizes, strict=True):
        kind = weight.dtype or dtype
        if reader is not None and reader.quantises(weight):
            loaded[weight.name] = reader.read(checkpoint, weight, shard, kind, device)
            done += size
            progress(done, total)
            continue
        target = _room(weight, shard, kind, device)
        loaded[weight.name] = target if weight.experts is None else _by_expert(target, weight)
        if later is not None and _can_wait(checkpoint, weight, kind):
            later.add(partial(read, weight, target.zero_(), size))
        else:
            read(weight, target, size)
    return loaded


def _can_wait(checkpoint: Checkpoint, weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a weight's numbers are of no interest to who makes the layers.

    Those of products and of the vocabulary are handed over as they are. In another type they would
    pass through memory of the GPU, which is measured meanwhile.
    """
    handed = weight.multiplied or weight.name in ("embedding", HEAD)
    return handed and all(checkpoint.dtype(each.name) == dtype for each in weight.sources)


def _stored_bytes(
    checkpoint: Checkpoint, weight: Weight, shard: Shard, reader: WeightReader | None
) -> int:
    """Bytes of a rank's shard of a weight in the files; of quantised ones all."""
    if reader is not None and reader.quantises(weight):
        return sum(
            checkpoint.number_bytes(name) * math.prod(checkpoint.shape(name))
            for name in reader.tensors(weight)
        )
    return sum(
        checkpoint.number_bytes(source.name) * math.prod(shard.shape(source))
        for source in weight.sources
    )


def read_dense(
    checkpoint: Checkpoint,
    weight: Weight,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A weight's sources, one after the other along their rows; one stack per expert."""
    merged = _room(weight, shard, dtype, device)
    _fill(merged, checkpoint, weight, shard)
    return merged if weight.experts is None else _by_expert(merged, weight)


def _room(weight: Weight, shard: Shard, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a rank's shard of a weight: [rows of all sources, ...]."""
    shapes = [shard.shape(source) for source in weight.sources]
    rows = sum(shape[0] for shape in shapes)
    merged = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=device)
    use_large_pages(merged)
    return merged


def _by_expert(merged: torch.Tensor, weight: Weight) -> torch.Tensor:
    assert weight.experts is not None
    return merged.view(weight.experts, -1, *merged.shape[1:])


def _fill(merged: torch.Tensor, checkpoint: Checkpoint, weight: Weight, shard: Shard) -> None:
    """Read a weight's sources, one after the other."""
    shapes = [shard.shape(source) for source in weight.sources]
    start = 0
    for source, shape in zip(weight.sources, shapes, strict=True):
        end = start + shape[0]
        there = start + len(shard.part(source.axes[0]))
        _read_into(merged[start:there], checkpoint, source, shard)
        merged[there:end].zero_()  # beyond the vocabulary's end
        start = end


def _read_into(target: torch.Tensor, checkpoint: Checkpoint, source: Source, shard: Shard) -> None:
    """A rank's shard of a source: in pieces, if numbers are as stored but for their type."""
    changed = source.transposed or source.function is not None
    if changed or source.stored_rows(shard.part(source.axes[0])) is not None:
        target.copy_(read_source(checkpoint, source, shard))
    else:
        axis, part = _divided(source, shard)
        checkpoint.read_into(target, source.name, axis, part, source.stack)


def read_source(checkpoint: Checkpoint, source: Source, shard: Shard) -> torch.Tensor:
    """A rank's shard of a source, as stored or as its function makes it."""
    rows = source.stored_rows(shard.part(source.axes[0]))
    if rows is not None:
        tensor = _read_rows(checkpoint, source, rows)
    else:
        axis, part = _divided(source, shard)
        tensor = checkpoint.read(source.name, axis, part, source.stack)
    if source.transposed:
        tensor = tensor.t()
    return tensor if source.function is None else source.function(tensor)


def _divided(source: Source, shard: Shard) -> tuple[int | None, range]:
    """The axis of the stored tensor that ranks divide, and this rank's part; None: none is."""
    axis = source.divided if shard.world > 1 else None
    if axis is None:
        return None, range(0)
    assert axis < 2, "rows are divided, or columns"
    return 1 - axis if source.transposed else axis, shard.part(source.axes[axis])


def _read_rows(checkpoint: Checkpoint, source: Source, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows (of a transposed tensor: columns) that need not be in order: what lies around them."""
    first = int(rows.min())
    around = range(first, int(rows.max()) + 1)
    axis = 1 if source.transposed else 0
    slab = checkpoint.read(source.name, axis, around, source.stack)
    return slab.index_select(axis, torch.from_numpy(rows - first))


def read_packed(
    checkpoint: Checkpoint, source: Source, shard: Shard, device: torch.device
) -> GroupedWeight:
    """Numbers of 4 bits as they are. Blocks lie along the inputs: ranks read whole rows of them."""
    assert source.scales is not None
    part = shard.part(source.axes[0])
    rows = source.stored_rows(part)
    rows = np.arange(part.start, part.stop) if rows is None else rows
    first = int(rows.min())
    around, own = range(first, int(rows.max()) + 1), torch.from_numpy(rows - first)
    blocks, scales = (
        checkpoint.read(name, 0, around, source.stack).index_select(0, own).to(device)
        for name in (source.name, source.scales)
    )
    weight, inputs = mxfp4.weight_of(blocks, scales), shard.part(source.axes[1])
    return weight if len(inputs) == weight.shape[1] else weight.inputs(inputs)
