"""A linear module of a quantised checkpoint: its tensors, and what its weight becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenpod.kernels.operations.weight import QuantisedWeight
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.weights.weights import StoredTensor

#: Kinds of numbers that scales have.
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The tensors of a module, whose names begin with its name."""

    checkpoint: Checkpoint
    name: str
    #: Of its weight.
    outputs: int
    inputs: int
    #: Where what is read goes.
    device: torch.device

    def __contains__(self, ending: str) -> bool:
        return self.name + ending in self.checkpoint

    def read(
        self, ending: str, rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor as stored, or these rows and columns of it."""
        name = self.name + ending
        shape = self.checkpoint.shape(name)
        if rows is not None and len(rows) < shape[0]:
            tensor = self.checkpoint.read(name, 0, rows)
            if columns is not None:
                tensor = tensor[:, columns.start : columns.stop]
        elif columns is not None and len(columns) < shape[1]:
            tensor = self.checkpoint.read(name, 1, columns)
        else:
            tensor = self.checkpoint.read(name)
        return tensor.to(self.device)


class Scheme(Protocol):
    """How a checkpoint holds a module's weight [out, in], and the format that it becomes."""

    @property
    def format(self) -> str:
        """In words, as "int4" or "fp8": for `Info`."""
        ...

    def tensors(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """What must be there, by the endings of names; the first tells that a module is so."""
        ...

    def optional(self, outputs: int, inputs: int) -> Mapping[str, StoredTensor]:
        """What may be there besides."""
        ...

    def bytes_of(self, outputs: range, inputs: range, whole: int, scale_bytes: int) -> int:
        """What these outputs and inputs, of `whole` inputs, take in memory at most.

        `scale_bytes`: of a scale as stored.
        """
        ...

    def read(self, module: StoredModule, outputs: range, inputs: range) -> QuantisedWeight:
        """These outputs and inputs; ModelError if the module's tensors can't be read."""
        ...


class PublishedLayout(Protocol):
    """How a checkpoint's config says that its modules are held."""

    @property
    def name(self) -> str:
        """Of the layout, as configs write it."""
        ...

    @property
    def strict(self) -> bool:
        """Whether the config says of every module what it is; otherwise its tensors do."""
        ...

    def scheme(self, module: str) -> Scheme | None:
        """Of a module, by its name; None: it is dense."""
        ...


@dataclass(frozen=True, slots=True)
class FamilyLayout:
    """A layout that a family's own names tell: which tensors are packed, and none besides."""

    name: str
    strict: bool = False

    def scheme(self, module: str) -> Scheme | None:
        """None: tensors of other names are dense."""
        del module
        return None
