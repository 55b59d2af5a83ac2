"""How the tensors of one layer become weights: what every part of a layer's table is made with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tokenpod.models.layers.norms import Norm
from tokenpod.models.weights.names import Fused, Names
from tokenpod.models.weights.weights import Axis, Segment, Source, Weight

#: A weight's rows, and in which order each of its heads is held; None: as stored.
Rows = tuple[Axis, tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Where a layer's tensors lie in a checkpoint; weights are named without the layer's number."""

    hidden_size: int
    names: Names
    #: What the names of the layer's tensors begin with, and those of tensors of all layers.
    at: str
    prefix: str = ""

    @property
    def hidden(self) -> Axis:
        """Features of the stream."""
        return Axis(self.hidden_size)

    def source(
        self, stored: str, rows: Axis, columns: Axis, order: tuple[int, ...] | None
    ) -> Source:
        """A tensor [rows, columns]."""
        return Source(f"{self.at}{stored}.weight", (rows, columns), order=order)

    def stacked(
        self, name: str, stored: tuple[str, ...] | Fused, rows: list[Rows], groups: int, bias: bool
    ) -> Iterator[Weight]:
        """A product of several weights' rows, whether the checkpoint has them fused or apart."""
        sizes = tuple(axis.length // groups for axis, _ in rows)
        for kind in ("weight", "bias") if bias else ("weight",):
            sources = []
            for index, (axis, order) in enumerate(rows):
                at = stored.name if isinstance(stored, Fused) else stored[index]
                segment = Segment(sizes, index, groups) if isinstance(stored, Fused) else None
                axes = (axis, self.hidden) if kind == "weight" else (axis,)
                turned = self.names.transposed and kind == "weight"
                name_there = f"{self.at}{at}.{kind}"
                sources.append(Source(name_there, axes, segment, order, transposed=turned))
            ours = name if kind == "weight" else f"{name}_bias"
            yield Weight(ours, tuple(sources), multiplied=kind == "weight")

    def cut(
        self, stored: str, parts: tuple[Axis, ...], *more: Axis, groups: int = 1
    ) -> tuple[Source, ...]:
        """The parts of one tensor, which has them group by group.

        `stored` is its whole name, `more` are the axes behind that of the parts.
        """
        sizes = tuple(axis.length // groups for axis in parts)
        return tuple(
            Source(self.at + stored, (axis, *more), Segment(sizes, i, groups))
            for i, axis in enumerate(parts)
        )

    def product(
        self, name: str, stored: str, rows: Axis, columns: Axis, bias: bool, scale: float = 1.0
    ) -> Iterator[Weight]:
        """A product of one tensor, and its bias, both times `scale`."""
        source = Source(
            f"{self.at}{stored}.weight", (rows, columns), transposed=self.names.transposed
        )
        yield Weight(name, (times(source, scale),), multiplied=True)
        if bias:
            added = Source(f"{self.at}{stored}.bias", (rows,))
            yield Weight(f"{name}_bias", (times(added, scale),))

    def single(self, name: str, stored: str, *axes: Axis) -> Weight:
        """A tensor that no ending is added to."""
        return Weight(name, (Source(self.at + stored, axes),))

    def norm(self, name: str, norm: Norm | None, stored: str, axis: Axis) -> Iterator[Weight]:
        """A norm's weight and bias, as far as it has them."""
        return norm_weights(name, norm, self.at + stored, axis)


def times(source: Source, factor: float) -> Source:
    """The same, multiplied when it is read."""
    return source if factor == 1.0 else replace(source, function=partial(torch.mul, other=factor))


def plain_weight(name: str, stored: str, *axes: Axis) -> Weight:
    """One tensor as it is."""
    return Weight(name, (Source(f"{stored}.weight", axes),))


def norm_weights(name: str, norm: Norm | None, stored: str, axis: Axis) -> Iterator[Weight]:
    """Weight and bias of a norm, as far as it has them; `stored` is the tensors' whole name."""
    if norm is None:
        return
    if norm.weight:
        weight = plain_weight(name, stored, axis)
        if norm.offset:
            # In float32: what is small beside the offset would be lost in fewer bits.
            sources = tuple(replace(source, function=_add_one) for source in weight.sources)
            weight = replace(weight, sources=sources, dtype=torch.float32)
        if norm.exact:
            weight = replace(weight, dtype=torch.float32)
        yield weight
    if norm.bias:
        yield Weight(f"{name}_bias", (Source(f"{stored}.bias", (axis,)),))


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x.float() + 1
