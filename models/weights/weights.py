"""Weights as data: our name, the checkpoint's tensors, how they are read and how ranks divide them.

A spec says which weights a model has and of what shapes; a family's `Names` say where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tokenpod.models.weights import mxfp4

#: The name of the head's weight.
HEAD = "head"


class Division(Enum):
    """How parallel ranks divide an axis."""

    #: Each rank holds it whole.
    WHOLE = "whole"
    #: Into equal parts.
    EVEN = "even"
    #: By key/value heads: evenly, or, of fewer heads than ranks, each rank has one.
    KEY = "key"
    #: Into blocks of one length, the last of which may reach beyond the end.
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Axis:
    """The length of an axis, and how ranks divide it; `unit` features are never parted."""

    length: int
    division: Division = Division.WHOLE
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Some rows of a fused tensor, which has `groups` times so many rows of each of its weights."""

    #: Rows of each weight in a group, in their order.
    sizes: tuple[int, ...]
    #: Which of them this is.
    index: int
    groups: int = 1

    def stored(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the weight's own `rows` lie in the fused tensor."""
        size = self.sizes[self.index]
        return rows // size * sum(self.sizes) + sum(self.sizes[: self.index]) + rows % size


class StoredTensor(NamedTuple):
    """What a tensor of the checkpoint must be."""

    shape: tuple[int, ...]
    #: Of numbers, as safetensors names them; those of dense weights by default.
    kinds: tuple[str, ...] = ("F32", "F16", "BF16")
    #: Other shapes in which the same is published.
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """All that it may have."""
        return (self.shape, *self.others)


@dataclass(frozen=True, slots=True)
class Stack:
    """Which of the equal weights that lie in one tensor."""

    index: int
    count: int
    #: Their rows follow each other; otherwise the tensor's first axis counts them.
    flat: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor that holds so many of `shape`."""
        return (self.count * shape[0], *shape[1:]) if self.flat else (self.count, *shape)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, or rows of one, and how it becomes (a part of) a weight."""

    name: str
    #: As we hold it: [out, in] or [out]; one of them may be divided.
    axes: tuple[Axis, ...]
    #: None: the tensor has no other rows.
    segment: Segment | None = None
    #: Within each head of so many rows, row r is the checkpoint's order[r].
    order: tuple[int, ...] | None = None
    #: The checkpoint has [in, out].
    transposed: bool = False
    #: Applied to what was read.
    function: Callable[[torch.Tensor], torch.Tensor] | None = None
    #: None: the tensor has one weight only.
    stack: Stack | None = None
    #: The tensor with its scales, if it is of numbers of 4 bits in blocks (`models.weights.mxfp4`).
    scales: str | None = None

    @property
    def divided(self) -> int | None:
        """Which axis ranks divide."""
        divided = [i for i, x in enumerate(self.axes) if x.division is not Division.WHOLE]
        return divided[0] if divided else None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        shape = [axis.length for axis in self.axes]
        if self.segment is not None:
            shape[0] = sum(self.segment.sizes) * self.segment.groups
        stored = tuple(reversed(shape) if self.transposed else shape)
        if self.scales is not None:
            stored = mxfp4.shape(stored)
        return stored if self.stack is None else self.stack.shape(stored)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Of the checkpoint, by name."""
        if self.scales is None:
            return {self.name: StoredTensor(self.stored_shape)}
        shape = self.stored_shape
        return {
            self.name: StoredTensor(shape, ("U8",)),
            self.scales: StoredTensor(shape[:-1], ("U8",)),
        }

    def stored_rows(self, part: range) -> npt.NDArray[np.int64] | None:
        """Which rows of the checkpoint's tensor are our rows `part`; None: the same."""
        if self.segment is None and self.order is None:
            return None
        rows = np.arange(part.start, part.stop)
        if self.order is not None:
            head = len(self.order)
            rows = rows // head * head + np.array(self.order)[rows % head]
        return rows if self.segment is None else self.segment.stored(rows)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the decoder: its sources, one after the other along their rows.

    With `experts` the sources are those of so many experts, and the tensor is [experts, out, in].
    """

    name: str
    sources: tuple[Source, ...]
    experts: int | None = None
    #: None: the model's.
    dtype: torch.dtype | None = None
    #: Whether products are made with it, so that it may be held in a format of fewer bits.
    multiplied: bool = False

    @property
    def stacked(self) -> bool:
        """Whether it is products' weights of all experts; they have biases, too."""
        return self.experts is not None and len(self.sources[0].axes) == 2

    @property
    def packed(self) -> bool:
        """Whether the checkpoint has it in numbers of 4 bits in blocks (`models.weights.mxfp4`)."""
        return any(source.scales is not None for source in self.sources)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The checkpoint's tensors that it is made of, by name."""
        return {name: x for source in self.sources for name, x in source.tensors.items()}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all ranks' together, experts' rows one after the other."""
        rows = sum(source.axes[0].length for source in self.sources)
        return (rows, *(axis.length for axis in self.sources[0].axes[1:]))
