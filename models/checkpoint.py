"""The safetensors files of a model folder. Nothing else is read: no pickles."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from tokenpod.kernels.weight import LinearWeight
from tokenpod.models import mxfp4
from tokenpod.models.errors import ModelError
from tokenpod.models.fields import read_fields
from tokenpod.models.linear import Weights
from tokenpod.models.shard import WHOLE, Shard
from tokenpod.models.weights import Source, Stack, StoredTensor, Weight

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

#: Bytes of numbers, by what safetensors calls their kinds.
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}
_ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}

Progress = Callable[[int, int], None]


class Checkpoint:
    """The tensors of a folder, by name; open until closed.

    Raises ModelError for a missing, truncated or malformed file.
    """

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        self._name_of_file: dict[str, str] = {}
        #: The files that it is made of.
        self.files = files_of(folder)
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
        return _ITEM_BYTES[self._slice(name).get_dtype()]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._slice(name).get_shape())

    def check(self, name: str, declared: StoredTensor) -> None:
        """Raise ModelError unless a tensor is there and is what it must be."""
        if name not in self._where:
            raise ModelError(f"tensor {name} is missing from the checkpoint")
        if self.shape(name) != declared.shape:
            raise ModelError(
                f"tensor {name} has shape {list(self.shape(name))}; "
                f"config.json says {list(declared.shape)}"
            )
        kind: str = self._slice(name).get_dtype()
        if kind not in declared.kinds:
            raise ModelError(
                f"{self._name_of_file[name]}: {name} holds {kind} numbers "
                f"(supported: {', '.join(declared.kinds)})"
            )

    def read(
        self,
        name: str,
        axis: int | None = None,
        part: range = range(0),
        stack: Stack | None = None,
    ) -> torch.Tensor:
        """A tensor as stored, or one of a stack: all, or features `part` along `axis`, 0 or 1."""
        if axis is None and stack is None:  # a single number has no axis to slice
            return self._checked(name, self._where[name].get_tensor(name))
        stored = self._slice(name)
        first, length = _within(stored.get_shape(), stack)
        if axis is not None and not part:  # the library refuses to read nothing
            return torch.empty([0 if i == axis else n for i, n in enumerate(length)])
        rows = part if axis == 0 else range(length[0])
        spans = [slice(first + rows.start, first + rows.stop)]
        if axis == 1:
            spans.append(slice(part.start, part.stop))
        counted = stack is not None and not stack.flat
        return self._checked(
            name, stored[(stack.index, *spans) if stack and counted else (*spans,)]
        )

    def _open(self, path: Path) -> None:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError:
            # The library says so of every file that it can't open.
            raise ModelError(f"{path}: {_problem(path)}") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: not a whole safetensors file ({error})") from None
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            if name in self._where:
                raise ModelError(f"{path}: {name} is also in {self._name_of_file[name]}")
            self._where[name] = file
            self._name_of_file[name] = path.name

    def _slice(self, name: str) -> Any:
        return self._where[name].get_slice(name)

    def _checked(self, name: str, tensor: Any) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"{self._name_of_file[name]}: {name} can't be read")
        return tensor


def _within(shape: list[int], stack: Stack | None) -> tuple[int, list[int]]:
    """The row at which a tensor, or one of a stack, begins, and its shape."""
    if stack is None:
        return 0, shape
    if not stack.flat:
        return 0, shape[1:]
    rows = shape[0] // stack.count
    return stack.index * rows, [rows, *shape[1:]]


def _problem(path: Path) -> str:
    """Why a file can't be opened."""
    try:
        with path.open("rb"):
            return "can't be read"
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return f"can't be read ({error.strerror})"


def files_of(folder: Path, single: str = SINGLE, index: str = INDEX) -> list[Path]:
    """The files that make up the checkpoint; ModelError if there are none."""
    if (folder / single).is_file():
        return [folder / single]
    if not (folder / index).is_file():
        raise ModelError(f"{folder}: neither {single} nor {index} is there")
    files = set(read_fields(folder / index).fields("weight_map").values.values())
    for name in files:
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ModelError(f"{folder / index}: {name!r} is not the name of a file beside it")
    return [folder / name for name in sorted(files)]


class WeightReader(Protocol):
    """Reads weights of products that are held in a format of fewer bits."""

    def quantises(self, weight: Weight) -> bool:
        """Whether a weight is held so; others are read as dense ones."""
        ...

    def tensors(self, weight: Weight) -> Mapping[str, StoredTensor]:
        """The checkpoint's tensors that such a weight is made of, by name."""
        ...

    def bytes_of(self, weight: Weight, shard: Shard) -> int:
        """What a rank's part of such a weight takes in memory."""
        ...

    def read(
        self, checkpoint: Checkpoint, weight: Weight, shard: Shard, device: torch.device
    ) -> LinearWeight:
        """A rank's part of such a weight; ModelError if its tensors can't be read."""
        ...


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
    declared: set[str] = set(optional)
    for weight in weights:
        quantised = reader is not None and reader.quantises(weight) and reader.tensors(weight)
        for name, tensor in (quantised or weight.tensors).items():
            declared.add(name)
            checkpoint.check(name, tensor)
    unknown = {
        name
        for name in checkpoint.names - declared
        if not name.endswith(surplus) and not name.startswith(beyond)
    }
    if unknown:
        raise ModelError(
            f"{architecture} has no tensor {_some(unknown)}: "
            "config.json and weights don't belong together"
        )


def _some(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return first if len(names) <= 3 else f"{first} (and {len(names) - 3} more)"


def read_weights(
    checkpoint: Checkpoint,
    weights: list[Weight],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    shard: Shard = WHOLE,
    reader: WeightReader | None = None,
) -> Weights:
    """Each weight in `dtype` on `device`, by our name; one weight at a time twice in memory.

    Weights that `reader` quantises are read by it instead. Of what ranks divide only this rank's
    shard is read, except where a format needs more for its scales. `progress` is told the bytes
    read from the files so far, and in all.
    """
    sizes = [_stored_bytes(checkpoint, weight, shard, reader) for weight in weights]
    total, done = sum(sizes), 0
    progress(done, total)
    loaded: Weights = {}
    for weight, size in zip(weights, sizes, strict=True):
        if reader is not None and reader.quantises(weight):
            loaded[weight.name] = reader.read(checkpoint, weight, shard, device)
        else:
            kind = weight.dtype or dtype
            loaded[weight.name] = read_dense(checkpoint, weight, shard, kind, device)
        done += size
        progress(done, total)
    return loaded


def _stored_bytes(
    checkpoint: Checkpoint, weight: Weight, shard: Shard, reader: WeightReader | None
) -> int:
    """Bytes of a rank's shard of a weight in the files; of quantised ones all."""
    if reader is not None and reader.quantises(weight):
        return sum(
            checkpoint.number_bytes(name) * math.prod(tensor.shape)
            for name, tensor in reader.tensors(weight).items()
        )
    return sum(
        mxfp4.bytes_of(math.prod(shard.shape(source)))
        if source.scales is not None
        else checkpoint.number_bytes(source.name) * math.prod(shard.shape(source))
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
    shapes = [shard.shape(source) for source in weight.sources]
    rows = sum(shape[0] for shape in shapes)
    # A copy even if nothing changes: what was read is backed by the file.
    merged = torch.empty((rows, *shapes[0][1:]), dtype=dtype, device=device)
    start = 0
    for source, shape in zip(weight.sources, shapes, strict=True):
        part = read_source(checkpoint, source, shard)
        end = start + shape[0]
        merged[start : start + len(part)].copy_(part)
        merged[start + len(part) : end].zero_()  # beyond the vocabulary's end
        start = end
    if weight.experts is None:
        return merged
    return merged.view(weight.experts, -1, *merged.shape[1:])


def read_source(checkpoint: Checkpoint, source: Source, shard: Shard) -> torch.Tensor:
    """A rank's shard of a source, as stored or as its function makes it."""
    if source.scales is not None:
        return _read_packed(checkpoint, source, shard)
    axis = source.divided if shard.world > 1 else None
    stored_axis = axis if axis is None or not source.transposed else 1 - axis
    rows = source.stored_rows(shard.part(source.axes[0]))
    if rows is not None:
        tensor = _read_rows(checkpoint, source, rows)
    elif axis is None:
        tensor = checkpoint.read(source.name, stack=source.stack)
    else:
        part = shard.part(source.axes[axis])
        tensor = checkpoint.read(source.name, stored_axis, part, source.stack)
    if source.transposed:
        tensor = tensor.t()
    return tensor if source.function is None else source.function(tensor)


def _read_rows(checkpoint: Checkpoint, source: Source, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows (of a transposed tensor: columns) that need not be in order: what lies around them."""
    first = int(rows.min())
    around = range(first, int(rows.max()) + 1)
    axis = 1 if source.transposed else 0
    slab = checkpoint.read(source.name, axis, around, source.stack)
    return slab.index_select(axis, torch.from_numpy(rows - first))


def _read_packed(checkpoint: Checkpoint, source: Source, shard: Shard) -> torch.Tensor:
    """Numbers of 4 bits as float32. Blocks lie along the inputs: ranks read whole rows of them."""
    assert source.scales is not None
    part = shard.part(source.axes[0])
    rows = source.stored_rows(part)
    rows = np.arange(part.start, part.stop) if rows is None else rows
    first = int(rows.min())
    around, own = range(first, int(rows.max()) + 1), torch.from_numpy(rows - first)
    blocks, scales = (
        checkpoint.read(name, 0, around, source.stack).index_select(0, own)
        for name in (source.name, source.scales)
    )
    inputs = shard.part(source.axes[1])
    return mxfp4.dequantised(blocks, scales)[:, inputs.start : inputs.stop]
