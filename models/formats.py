"""Formats of fewer bits that weights of products are held in, made while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tokenpod.kernels.int8 import quantise_rows
from tokenpod.kernels.ops import Int8Weight
from tokenpod.kernels.weight import LinearWeight
from tokenpod.models.errors import ModelError
from tokenpod.models.shard import Shard
from tokenpod.models.spec import Experts, ModelSpec
from tokenpod.models.weights import Weight

#: By the operator's name: from a weight [out, in] in float32.
FORMATS: dict[str, Callable[[torch.Tensor], Int8Weight]] = {"int8": quantise_rows}


def check_format(spec: ModelSpec, quantize: str | None) -> None:
    """Raise ModelError if a model's products can't be held in a format."""
    if quantize is None:
        return
    if quantize not in FORMATS:
        raise ModelError(f"quantize is {quantize!r}; supported: {', '.join(FORMATS)}")
    if any(isinstance(layer.mlp, Experts) for layer in spec.layers):
        raise ModelError(
            f"quantize is {quantize}: {spec.architecture} has experts, which are held as they are"
        )


def quantised(weight: torch.Tensor, quantize: str, columns: range | None) -> LinearWeight:
    """Weight [out, in] float32 in a format; of its inputs, the `columns` that this rank has.

    Scales are those of whole rows, so that the numbers do not depend on how many ranks there are.
    """
    made = FORMATS[quantize](weight)
    if columns is not None:
        kept = made.weight[:, columns.start : columns.stop].contiguous()
        made = made._replace(weight=kept)
    return LinearWeight((made,))


def bytes_needed(
    weights: Iterable[Weight], shard: Shard, dtype: torch.dtype, quantize: str | None
) -> int:
    """Bytes of a rank's weights."""
    total = 0
    for weight in weights:
        numbers = shard.numbers([weight])
        if quantize is None or not weight.multiplied:
            total += numbers * (weight.dtype or dtype).itemsize
        else:
            rows = sum(shard.shape(source)[0] for source in weight.sources)
            total += numbers + rows * torch.float32.itemsize
    return total
