"""Formats of fewer bits that weights of products are held in: how they come from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

import torch

from tokenpod.core.formats import LAYOUTS, SAME_AS
from tokenpod.kernels.operations.ops import Operations
from tokenpod.kernels.operations.weight import LinearWeight, QuantisedWeight, StackedWeight
from tokenpod.kernels.products.formats import MADE_AT_LOAD
from tokenpod.kernels.products.formats.narrow import DTYPES, NarrowWeight
from tokenpod.models.checkpoints.checkpoint import Checkpoint, Quantised, WeightReader
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.reading import read_dense
from tokenpod.models.layouts.module import PublishedLayout
from tokenpod.models.layouts.reader import PublishedReader
from tokenpod.models.specs.spec import ModelSpec
from tokenpod.models.weights.shard import WHOLE, Shard
from tokenpod.models.weights.weights import HEAD, StoredTensor, Weight

#: Tables that rows are taken of, by our names.
TABLES = ("embedding", "per_layer_embedding")


def reader_for(
    spec: ModelSpec,
    quantize: str | None,
    layout: PublishedLayout | None = None,
    there: Checkpoint | None = None,
    *,
    head: bool = False,
) -> WeightReader | None:
    """What reads weights of products; None: they are dense.

    Args:
        spec: of the model.
        quantize: what the operator asked for; None: the checkpoint decides.
        layout: how the checkpoint is quantised; None: it is not.
        there: the checkpoint; None: only its config is known.
        head: whether the head's weight is made in that format too.

    Raises ModelError for an unknown format, one that the checkpoint is not in, or one that the
    model's products can't be held in.
    """
    if layout is not None:
        _check_layout(quantize, layout)
        if head:
            raise ModelError(
                f"quantize_head: the head is as the checkpoint has it ({layout.name}); only what "
                "is made while loading has another"
            )
        return PublishedReader(layout, there)
    if quantize is None:
        return None
    made = SAME_AS.get(quantize, quantize)
    if made in LAYOUTS and made not in MADE_AT_LOAD:
        raise ModelError(
            f"quantize is {quantize}: the checkpoint is not quantised "
            f"(made while loading: {', '.join(MADE_AT_LOAD)})"
        )
    if made not in MADE_AT_LOAD:
        raise ModelError(f"quantize is {quantize!r}; supported: {', '.join(MADE_AT_LOAD)}")
    return MadeAtLoad(made, MADE_AT_LOAD[made], head=head)


def _check_layout(quantize: str | None, layout: PublishedLayout) -> None:
    """Raise ModelError if the operator asked for another layout than the checkpoint has."""
    if quantize is None or layout.name in LAYOUTS.get(quantize, (quantize,)):
        return
    raise ModelError(
        f"quantize is {quantize}: the checkpoint's own quantization_config says {layout.name} "
        f"(--quantize none or {layout.name} serves it)"
    )


#: That are widened to float32 at a time, while a format is made of them: what a core's cache holds;
#: and on a GPU, where each piece costs as many launches as a whole weight, 64 MiB.
_NUMBERS, _NUMBERS_ON_GPU = 1 << 16, 1 << 24


@dataclass(frozen=True, slots=True)
class MadeAtLoad:
    """Makes weights of a format from those of a dense checkpoint."""

    name: str
    format: type[QuantisedWeight]
    #: Whether the head is made so too.
    head: bool = False

    def quantises(self, weight: Weight) -> bool:
        """All that products are made with, but the embedding and routers."""
        return weight.multiplied or weight.stacked or (self.head and weight.name == HEAD)

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """Those of the dense weight."""
        return weight.tensors

    def quantised(self, weight: Weight, shard: Shard) -> Quantised:
        """All of a rank's part, before it is read."""
        size = sum(
            self.format.bytes_of(*(shard.part(axis) for axis in source.axes))
            for source in weight.sources
        )
        return Quantised(shard.numbers([weight]), size)

    def read(
        self,
        checkpoint: Checkpoint,
        weight: Weight,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LinearWeight | StackedWeight:
        """A rank's part. Its numbers do not depend on how many ranks there are."""
        del dtype
        parts = [
            self._part(checkpoint, replace(weight, sources=(source,), experts=None), shard, device)
            for source in weight.sources
        ]
        joined = self.format.joined(parts) if len(parts) > 1 else parts[0]
        if weight.experts is not None:
            assert joined is not None, "parts of one shape are alike"
            return StackedWeight(joined, weight.experts)
        return LinearWeight((joined,) if joined is not None else tuple(parts))

    def _part(
        self, checkpoint: Checkpoint, weight: Weight, shard: Shard, device: torch.device
    ) -> QuantisedWeight:
        """One source, of which more is read than is kept where numbers share what is divided."""
        outputs, inputs = (shard.part(axis) for axis in weight.sources[0].axes)
        divided = weight.sources[0].divided
        apart = divided is None or (divided == 0 and self.format.outputs_apart)
        read = shard if apart else WHOLE
        made = self._made(read_dense(checkpoint, weight, read, _stored(checkpoint, weight), device))
        if apart or made.shape == (len(outputs), len(inputs)):
            return made
        return made.inputs(inputs) if divided else made.outputs(slice(outputs.start, outputs.stop))

    def _made(self, dense: torch.Tensor) -> QuantisedWeight:
        """Of a weight [out, in] as it is stored; some outputs at a time are widened."""
        at_once = _NUMBERS if dense.device.type == "cpu" else _NUMBERS_ON_GPU
        rows = max(at_once // max(dense.shape[1], 1), 1)
        if not self.format.outputs_apart or len(dense) <= rows:
            return self.format.made_of(dense.float())
        made: QuantisedWeight | None = None
        whole: dict[str, torch.Tensor] = {}
        for start in range(0, len(dense), rows):
            made = self.format.made_of(dense[start : start + rows].float())
            for name, part in _tensors(made):
                if name not in whole:
                    whole[name] = part.new_empty((len(dense), *part.shape[1:]))
                whole[name][start : start + rows] = part
        assert made is not None
        # In place: parts and a whole made of them would be there at once.
        return replace(made, **whole)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class AsStored:
    """Reads weights whose numbers have 16 bits without widening them, and others by `inner`.

    Those of products, of experts, and tables of embeddings: half the memory, and nothing is lost.
    """

    #: What reads weights in a format of fewer bits; None: there are none.
    inner: WeightReader | None
    #: None: only its config is known, whose numbers these are.
    there: Checkpoint | None
    dtype: torch.dtype | None

    @property
    def name(self) -> str:
        """Of formats of fewer bits."""
        return self.inner.name if self.inner is not None else ""

    def quantises(self, weight: Weight) -> bool:
        """Whether it is read here, or by `inner`."""
        return self._by(weight) is not None or self.kind(weight) is not None

    def kind(self, weight: Weight) -> torch.dtype | None:
        """That of all numbers of a weight that stays as it is stored; None: another does not."""
        used = weight.multiplied or weight.stacked or weight.name in (*TABLES, HEAD)
        if not used or weight.dtype is not None or self._by(weight) is not None:
            return None
        if any(x.function is not None or x.scales is not None for x in weight.sources):
            return None
        if self.there is None:
            kinds = {self.dtype}
        else:
            kinds = {self.there.dtype(x.name) for x in weight.sources if x.name in self.there}
        found = kinds.pop() if len(kinds) == 1 else None
        return found if found in DTYPES else None

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """See `WeightReader`."""
        inner = self._by(weight)
        return weight.tensors if inner is None else inner.tensors(weight)

    def quantised(self, weight: Weight, shard: Shard) -> Quantised:
        """See `WeightReader`."""
        inner = self._by(weight)
        if inner is not None:
            return inner.quantised(weight, shard)
        numbers = shard.numbers([weight])
        return Quantised(numbers, numbers * torch.bfloat16.itemsize)

    def read(
        self,
        checkpoint: Checkpoint,
        weight: Weight,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | LinearWeight | StackedWeight:
        """A rank's part; of a table a tensor of 16 bits."""
        inner = self._by(weight)
        if inner is not None:
            return inner.read(checkpoint, weight, shard, dtype, device)
        kind = self.kind(weight)
        assert kind is not None, weight.name
        numbers = read_dense(checkpoint, weight, shard, kind, device)
        if weight.experts is not None:
            return StackedWeight(NarrowWeight(numbers.flatten(0, 1)), weight.experts)
        return numbers if weight.name in TABLES else LinearWeight((NarrowWeight(numbers),))

    def _by(self, weight: Weight) -> WeightReader | None:
        """`inner`, if it reads a weight."""
        return self.inner if self.inner is not None and self.inner.quantises(weight) else None


def as_stored(
    spec: ModelSpec,
    reader: WeightReader | None,
    there: Checkpoint | None,
    dtype: torch.dtype,
    ops: Operations,
) -> WeightReader | None:
    """The same reader, or one that leaves numbers of 16 bits as they are.

    Where `ops` make products with these in float32 and the model computes so (`dtype`): with one
    that encodes texts not, whose long steps a library multiplies faster from float32.
    """
    if dtype != torch.float32 or NarrowWeight not in ops.quantised or spec.encodes:
        return reader
    return AsStored(reader, there, spec.dtype)


def _tensors(weight: QuantisedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """Fields of a weight made while loading that are tensors: each has a row per output."""
    for field in fields(weight):  # type: ignore[arg-type]
        value = getattr(weight, field.name)
        if isinstance(value, torch.Tensor):
            yield field.name, value


def _stored(checkpoint: Checkpoint, weight: Weight) -> torch.dtype:
    """The type in which a weight loses nothing, and takes no more memory than in the file."""
    source = weight.sources[0]
    if source.function is not None:
        return torch.float32
    return checkpoint.dtype(source.name)


def bytes_needed(
    weights: Iterable[Weight], shard: Shard, dtype: torch.dtype, reader: WeightReader | None
) -> int:
    """Bytes of a rank's weights."""
    total = 0
    for weight in weights:
        held = Quantised(0, 0)
        if reader is not None and reader.quantises(weight):
            held = reader.quantised(weight, shard)
        dense = shard.numbers([weight]) - held.numbers
        total += held.size + dense * (weight.dtype or dtype).itemsize
    return total
