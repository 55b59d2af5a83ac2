"""Reads a model's weights from modules that are quantised, part by part, for one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tokenpod.kernels.operations.weight import LinearWeight, QuantisedWeight, StackedWeight, Stored
from tokenpod.models.checkpoints.checkpoint import Checkpoint, Quantised
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.layers.reading import read_dense, read_packed
from tokenpod.models.layouts.module import PublishedLayout, Scheme, StoredModule
from tokenpod.models.weights import mxfp4
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Source, StoredTensor, Weight

_WEIGHT = ".weight"
#: Endings of names of scales that are held as they are stored.
_SCALES = (".scales", ".weight_scale")


@dataclass(frozen=True)
class PublishedReader:
    """Of a checkpoint in a layout that others have published it in.

    Weights of products are held in its format, those of experts in one stack. What is multiplied
    otherwise (the latent rows' projection, heads) becomes dense while it is read; so do experts
    that differ in their format, or in the order of their inputs.
    """

    layout: PublishedLayout
    #: None: only its config is known.
    there: Checkpoint | None
    _schemes: dict[tuple[str, bool], Scheme | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the layout, and of the formats of the modules that have been asked for."""
        formats = {scheme.format for scheme in self._schemes.values() if scheme is not None}
        held = " and ".join(sorted(formats))
        return held if held == self.layout.name else f"{self.layout.name} {held}".rstrip()

    def quantises(self, weight: Weight) -> bool:
        """Whether any of its sources is quantised."""
        return weight.packed or any(
            self._scheme(weight, source) is not None for source in weight.sources
        )

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """Those of quantised sources, and the others' as they are."""
        found: dict[str, StoredTensor] = {}
        for source in weight.sources:
            scheme = self._scheme(weight, source)
            if scheme is None:
                found |= source.tensors
                continue
            module, shape = _module(source), _shape(source)
            found |= {module + end: x for end, x in scheme.tensors(*shape).items()}
            for end, tensor in scheme.optional(*shape).items():
                if self.there is not None and module + end in self.there:
                    found[module + end] = tensor
        return found

    def quantised(self, weight: Weight, shard: Shard) -> Quantised:
        """A rank's numbers that are held in fewer bits, and their bytes."""
        if weight.packed:
            return packed_bytes(weight, shard)
        if not self._stays(weight):
            return Quantised(0, 0)
        numbers = size = 0
        for source in weight.sources:
            scheme = self._scheme(weight, source)
            if scheme is not None:
                outputs, inputs = (shard.part(axis) for axis in source.axes)
                numbers += len(outputs) * len(inputs)
                size += scheme.bytes_of(
                    outputs, inputs, source.axes[1].length, self._scale_bytes(_module(source))
                )
        return Quantised(numbers, size)

    def idle_biases(self, weights: Iterable[Weight], architecture: str) -> list[str]:
        """Names of biases that the model does not have: some packers write zeros for every module.

        ModelError for one that is not zero.
        """
        assert self.there is not None
        sources = [(weight, source) for weight in weights for source in weight.sources]
        own = {source.name for _, source in sources}
        modules = {_module(x) for weight, x in sources if self._scheme(weight, x) is not None}
        idle = sorted({f"{module}.bias" for module in modules} & self.there.names - own)
        for name in idle:
            if bool(self.there.read(name).count_nonzero()):
                raise ModelError(f"{name} is not zero, and {architecture} has no such bias")
        return idle

    def read(
        self,
        checkpoint: Checkpoint,
        weight: Weight,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | LinearWeight | StackedWeight:
        """A rank's part of a weight: in the module's format, in a stack, or dense."""
        if weight.packed:
            return read_stack(checkpoint, weight, shard, device)
        if not self._stays(weight):
            return self._dense(checkpoint, weight, shard, dtype, device)
        parts: list[Stored] = []
        for source in weight.sources:
            scheme = self._scheme(weight, source)
            if scheme is None:
                own = replace(weight, sources=(source,))
                parts.append(read_dense(checkpoint, own, shard, dtype, device))
            else:
                parts.append(_part(checkpoint, source, scheme, shard, device))
        if weight.experts is None:
            return LinearWeight(_joined(parts))
        joined = _joined(parts)
        if len(joined) == 1 and isinstance(joined[0], QuantisedWeight):
            return StackedWeight(joined[0], weight.experts)
        return self._dense(checkpoint, weight, shard, dtype, device)

    def _stays(self, weight: Weight) -> bool:
        """Whether a weight is held in fewer bits: if products are made with it, one by one or all.

        Experts' are one launch, for which they must be of one kind. What a model multiplies when
        it is read is held as it comes out.
        """
        if not weight.stacked:
            return weight.multiplied and all(x.function is None for x in weight.sources)
        first, *others = (self._scheme(weight, source) for source in weight.sources)
        ordered = bool(getattr(first, "act_order", False))
        return first is not None and not ordered and all(other == first for other in others)

    def _dense(
        self,
        checkpoint: Checkpoint,
        weight: Weight,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """What the numbers stand for, in `dtype`; rows beyond a vocabulary's end are zero."""
        shapes = [shard.shape(source) for source in weight.sources]
        rows = sum(shape[0] for shape in shapes)
        merged = torch.zeros((rows, *shapes[0][1:]), dtype=dtype, device=device)
        start = 0
        for source, shape in zip(weight.sources, shapes, strict=True):
            scheme = self._scheme(weight, source)
            if scheme is None:
                own = replace(weight, sources=(source,), experts=None)
                part = read_dense(checkpoint, own, shard, dtype, device)
            else:
                part = _part(checkpoint, source, scheme, shard, device).dequantised(torch.float32)
                part = part if source.function is None else source.function(part)
            merged[start : start + len(part)] = part
            start += shape[0]
        return merged if weight.experts is None else merged.view(weight.experts, -1, shapes[0][1])

    def _scale_bytes(self, module: str) -> int:
        """Of a module's scales; of published ones usually 2."""
        names = (module + ending for ending in _SCALES)
        found = (name for name in names if self.there is not None and name in self.there)
        return max((self.there.number_bytes(name) for name in found if self.there), default=2)

    def _scheme(self, weight: Weight, source: Source) -> Scheme | None:
        """Of a source; None: it is dense."""
        module = source.name.removesuffix(_WEIGHT)
        if len(source.axes) != 2 or module == source.name or source.stack or source.transposed:
            return None
        certain = weight.multiplied or weight.experts is not None
        key = module, certain
        if key not in self._schemes:
            self._schemes[key] = self._scheme_of(module, _shape(source), certain=certain)
        return self._schemes[key]

    def _scheme_of(self, module: str, shape: tuple[int, int], *, certain: bool) -> Scheme | None:
        """`certain`: a linear module in every model; others may be something else."""
        scheme = self.layout.scheme(module)
        if scheme is None or self.there is None:
            return scheme if certain else None
        if certain and self.layout.strict:
            return scheme
        marker = next(iter(scheme.tensors(*shape)))
        return scheme if module + marker in self.there else None


def packed_bytes(weight: Weight, shard: Shard) -> Quantised:
    """What a rank's part of a weight takes that is stored in blocks of 4 bits."""
    parts = [[shard.part(axis) for axis in source.axes] for source in weight.sources]
    size = sum(mxfp4.bytes_of(outputs, inputs) for outputs, inputs in parts)
    return Quantised(shard.numbers([weight]), size + mxfp4.shared_bytes(parts[0][1]))


def read_stack(
    checkpoint: Checkpoint, weight: Weight, shard: Shard, device: torch.device
) -> StackedWeight:
    """A rank's part of experts that are stored in blocks of 4 bits, as they are."""
    parts = [read_packed(checkpoint, source, shard, device) for source in weight.sources]
    joined = parts[0].joined(parts)
    assert joined is not None, "blocks are alike"
    assert weight.experts is not None
    return StackedWeight(joined, weight.experts)


def _module(source: Source) -> str:
    return source.name.removesuffix(_WEIGHT)


def _shape(source: Source) -> tuple[int, int]:
    """Outputs and inputs of the module that a source is rows of."""
    outputs, inputs = source.stored_shape
    return outputs, inputs


def _part(
    checkpoint: Checkpoint, source: Source, scheme: Scheme, shard: Shard, device: torch.device
) -> QuantisedWeight:
    """A rank's part of one source."""
    outputs, inputs = (shard.part(axis) for axis in source.axes)
    module = StoredModule(checkpoint, _module(source), *_shape(source), device)
    rows = source.stored_rows(outputs)
    if rows is None:
        return scheme.read(module, outputs, inputs)
    first = int(rows.min())
    weight = scheme.read(module, range(first, int(rows.max()) + 1), inputs)
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        return weight
    return weight.outputs(torch.from_numpy(rows - first).to(device))


def _joined(parts: list[Stored]) -> tuple[Stored, ...]:
    """One part, if all are of one format and its rule allows it."""
    first = parts[0]
    if len(parts) == 1:
        return tuple(parts)
    if all(isinstance(part, torch.Tensor) for part in parts):
        return (torch.cat([part for part in parts if isinstance(part, torch.Tensor)]),)
    if isinstance(first, torch.Tensor) or any(type(part) is not type(first) for part in parts):
        return tuple(parts)
    joined = first.joined([part for part in parts if isinstance(part, type(first))])
    return tuple(parts) if joined is None else (joined,)
