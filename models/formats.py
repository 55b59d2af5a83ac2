"""Formats of fewer bits that weights of products are held in: how they come from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tokenpod.kernels.formats import MADE_AT_LOAD
from tokenpod.kernels.weight import LinearWeight, QuantisedWeight
from tokenpod.models.checkpoint import Checkpoint, WeightReader
from tokenpod.models.errors import ModelError
from tokenpod.models.layer_spec import Experts
from tokenpod.models.reading import read_dense
from tokenpod.models.shard import WHOLE, Shard
from tokenpod.models.spec import ModelSpec
from tokenpod.models.weights import StoredTensor, Weight


def reader_for(spec: ModelSpec, quantize: str | None) -> WeightReader | None:
    """What reads weights of products; None: they are dense.

    Raises ModelError for an unknown format, or one that the model's products can't be held in.
    """
    if quantize is None:
        return None
    if quantize not in MADE_AT_LOAD:
        raise ModelError(f"quantize is {quantize!r}; supported: {', '.join(MADE_AT_LOAD)}")
    if any(isinstance(layer.mlp, Experts) for layer in spec.layers):
        raise ModelError(
            f"quantize is {quantize}: {spec.architecture} has experts, which are held as they are"
        )
    return MadeAtLoad(MADE_AT_LOAD[quantize])


@dataclass(frozen=True, slots=True)
class MadeAtLoad:
    """Makes weights of a format from those of a dense checkpoint."""

    format: type[QuantisedWeight]

    def quantises(self, weight: Weight) -> bool:
        """All that products are made with, but embedding and head."""
        return weight.multiplied

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """Those of the dense weight."""
        return weight.tensors

    def bytes_of(self, weight: Weight, shard: Shard) -> int:
        """Of a rank's part, before it is read."""
        return sum(
            self.format.bytes_of(*(shard.part(axis) for axis in source.axes))
            for source in weight.sources
        )

    def read(
        self, checkpoint: Checkpoint, weight: Weight, shard: Shard, device: torch.device
    ) -> LinearWeight:
        """A rank's part. Its numbers do not depend on how many ranks there are."""
        parts = [
            self._part(checkpoint, replace(weight, sources=(source,)), shard, device)
            for source in weight.sources
        ]
        joined = self.format.joined(parts) if len(parts) > 1 else parts[0]
        return LinearWeight((joined,) if joined is not None else tuple(parts))

    def _part(
        self, checkpoint: Checkpoint, weight: Weight, shard: Shard, device: torch.device
    ) -> QuantisedWeight:
        """One source, of which more is read than is kept where numbers share what is divided."""
        outputs, inputs = (shard.part(axis) for axis in weight.sources[0].axes)
        divided = weight.sources[0].divided
        apart = divided is None or (divided == 0 and self.format.outputs_apart)
        read = shard if apart else WHOLE
        made = self.format.made_of(read_dense(checkpoint, weight, read, torch.float32, device))
        if apart:
            return made
        return made.inputs(inputs) if divided else made.outputs(slice(outputs.start, outputs.stop))


def bytes_needed(
    weights: Iterable[Weight], shard: Shard, dtype: torch.dtype, reader: WeightReader | None
) -> int:
    """Bytes of a rank's weights."""
    return sum(
        reader.bytes_of(weight, shard)
        if reader is not None and reader.quantises(weight)
        else shard.numbers([weight]) * (weight.dtype or dtype).itemsize
        for weight in weights
    )
