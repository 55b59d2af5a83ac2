"""The safetensors files of a model folder. Nothing else is read: no pickles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from tokenpod.core.model_files import PICKLES
from tokenpod.kernels.operations.weight import LinearWeight, StackedWeight
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.fields import read_fields
from tokenpod.models.checkpoints.pieces import READERS, Pieces
from tokenpod.models.checkpoints.tensor_file import DTYPES, TensorFile
from tokenpod.models.weights.shard import Shard
from tokenpod.models.weights.weights import Stack, StoredTensor, Weight

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder, by name; open until closed.

    `single`: how the file is called, if it is one. Raises ModelError for a missing, truncated or
    malformed file.
    """

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        self._files = ExitStack()
        readers = self._files.enter_context(ThreadPoolExecutor(READERS, "weights"))
        self._pieces = Pieces(readers)
        self._where: dict[str, TensorFile] = {}
        #: The files that it is made of.
        self.files = files_of(folder, single)
        try:
            for path in self.files:
                self._open(path)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._where)

    def number_bytes(self, name: str) -> int:
        """Bytes of each number of a tensor."""
        return self.dtype(name).itemsize

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor's numbers."""
        file = self._where[name]
        kind = file.entries[name].kind
        if kind not in DTYPES:
            raise ModelError(f"{file.name}: {name} holds {kind} numbers, which are not read")
        return DTYPES[kind]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._where[name].entries[name].shape

    def check(self, name: str, declared: StoredTensor) -> None:
        """Raise ModelError unless a tensor, which is there, is what it must be."""
        if self.shape(name) not in declared.shapes:
            raise ModelError(
                f"tensor {name} has shape {list(self.shape(name))}; "
                f"config.json says {list(declared.shape)}"
            )
        file = self._where[name]
        kind = file.entries[name].kind
        if kind not in declared.kinds:
            raise ModelError(
                f"{file.name}: {name} holds {kind} numbers (supported: {', '.join(declared.kinds)})"
            )

    def read(
        self,
        name: str,
        axis: int | None = None,
        part: range = range(0),
        stack: Stack | None = None,
    ) -> torch.Tensor:
        """A tensor as stored, or one of a stack: all, or features `part` along `axis`, 0 or 1."""
        shape = list(_within(self.shape(name), stack)[1])
        if axis is not None:
            shape[axis] = len(part)
        target = torch.empty(shape, dtype=self.dtype(name))
        self.read_into(target, name, axis, part, stack)
        return target

    def read_into(
        self,
        target: torch.Tensor,
        name: str,
        axis: int | None = None,
        part: range = range(0),
        stack: Stack | None = None,
    ) -> None:
        """The same into `target`, contiguous, in its dtype and on its device."""
        first, shape = _within(self.shape(name), stack)
        if axis == 0:
            first += part.start
        columns = part if axis == 1 else None
        rows = target if target.dim() else target[None]
        self._where[name].read(rows, name, first, shape[1:], columns)

    def _open(self, path: Path) -> None:
        file = TensorFile(path, self._pieces)
        self._files.callback(file.close)
        for name in file.entries:
            if name in self._where:
                raise ModelError(f"{path}: {name} is also in {self._where[name].name}")
            self._where[name] = file


def _within(shape: tuple[int, ...], stack: Stack | None) -> tuple[int, tuple[int, ...]]:
    """The row at which a tensor, or one of a stack, begins, and its shape."""
    if stack is None:
        return 0, shape
    if not stack.flat:
        return stack.index * shape[1], shape[1:]
    rows = shape[0] // stack.count
    return stack.index * rows, (rows, *shape[1:])


def files_of(folder: Path, single: str = SINGLE, index: str = INDEX) -> list[Path]:
    """The files that make up the checkpoint; ModelError if there are none."""
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        raise ModelError(f"{folder}: neither {single} nor {index} is there{_conversion(folder)}")
    files = set(read_fields(folder / index).fields("weight_map").values.values())
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ModelError(f"{folder / index}: {name!r} is not the name of a file beside it")
    return [folder / name for name in sorted(files)]


def _conversion(folder: Path) -> str:
    """What makes safetensors of the files that are there instead; "" if nothing does."""
    pickles = next((path for kind in PICKLES for path in sorted(folder.glob(kind))), None)
    if pickles is not None:
        source, made = folder, f"{folder}-safetensors"
    elif (gguf := next(iter(sorted(folder.glob("*.gguf"))), None)) is not None:
        source, made = gguf, f"{folder}-safetensors"
    else:
        return ""
    return f"; `tokenpod convert {source} {made}` makes them of {(pickles or source).name}"


class Quantised(NamedTuple):
    """What a rank holds of a weight in fewer bits."""

    #: Those of its numbers that are held so; others take the model's dtype.
    numbers: int
    #: Bytes of these, at most.
    size: int


class WeightReader(Protocol):
    """Reads weights that are stored, or held, in a format of fewer bits."""

    @property
    def name(self) -> str:
        """Of the layout, if the checkpoint has one, and of the formats of what was read so far."""
        ...

    def quantises(self, weight: Weight) -> bool:
        """Whether it reads a weight; others are read as dense ones."""
        ...

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """The checkpoint's tensors that such a weight is made of, by name."""
        ...

    def quantised(self, weight: Weight, shard: Shard) -> Quantised:
        """What a rank's part of such a weight takes in memory."""
        ...

    def read(
        self,
        checkpoint: Checkpoint,
        weight: Weight,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | LinearWeight | StackedWeight:
        """A rank's part of such a weight, in `dtype` where it is dense.

        ModelError if its tensors can't be read.
        """
        ...


def tensors_of(weight: Weight, reader: WeightReader | None) -> Mapping[str, StoredTensor]:
    """The checkpoint's tensors that a weight is made of, by name."""
    quantised = reader is not None and reader.quantises(weight)
    return reader.tensors(weight) if reader is not None and quantised else weight.tensors


def check(
    checkpoint: Checkpoint,
    weights: Iterable[Weight],
    architecture: str,
    *,
    reader: WeightReader | None = None,
    optional: Collection[str] = (),
    surplus: tuple[str, ...] = (),
    beyond: tuple[str, ...] = (),
) -> None:
    """Every declared tensor is there with its shape, and nothing else; else ModelError.

    Args:
        checkpoint: that a model is to be read from.
        weights: of the model.
        architecture: the model's, for the error.
        reader: of weights that are quantised.
        optional: names that may be there besides.
        surplus: endings of names that may be there besides.
        beyond: beginnings of such names.
    """
    declared: dict[str, StoredTensor] = {}
    for weight in weights:
        declared |= tensors_of(weight, reader)
    missing = declared.keys() - checkpoint.names
    for name, tensor in declared.items():
        if name not in missing:
            checkpoint.check(name, tensor)
    if missing:
        number = "tensor {} is" if len(missing) == 1 else "tensors {} are"
        raise ModelError(f"{number.format(_some(missing))} missing from the checkpoint")
    unknown = {
        name
        for name in checkpoint.names - {*declared, *optional}
        if not name.endswith(surplus) and not name.startswith(beyond)
    }
    if unknown:
        raise ModelError(
            f"{architecture} has no tensor {_some(unknown)}: "
            "config.json and weights don't belong together"
        )


def _some(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} (and {len(names) - 3} more)"
