"""Safetensors files, one tensor in memory at a time, and their digests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import torch

from tokenpod.models.checkpoints.checkpoint import INDEX, SINGLE
from tokenpod.models.checkpoints.errors import ModelError

#: What safetensors calls kinds of numbers.
KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
#: Bytes that are hashed and written at once.
_PIECE = 16 << 20

#: Told bytes that are written, and in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor to be written: what it will be, and how it is made when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype | None) -> Planned:
        """The same in another type of real numbers; whole numbers stay. None: as it is."""
        if dtype is None or not self.dtype.is_floating_point or dtype == self.dtype:
            return self
        return Planned(self.name, dtype, self.shape, lambda: self.read().to(dtype))


def write_tensors(
    folder: Path, tensors: Sequence[Planned], *, most: int, progress: Progress
) -> dict[str, str]:
    """Write tensors into files of at most so many bytes, with an index if there are several.

    A tensor that is larger has a file of its own. Returns the digest of each file by its name.
    Raises ModelError for types that safetensors lacks, and what reading a tensor raises; OSError
    if the disk is full.
    """
    for tensor in tensors:
        if tensor.dtype not in KINDS:
            raise ModelError(f"{tensor.name} is {tensor.dtype}, which safetensors can't hold")
    shards = list(_divided(tensors, most))
    names = [SINGLE]
    if len(shards) != 1:
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    total, done = sum(tensor.size for tensor in tensors), 0
    digests = {}
    for name, shard in zip(names, shards, strict=True):
        digests[name] = _write(folder / name, shard, partial(_tell, progress, done, total))
        done += sum(tensor.size for tensor in shard)
    if len(shards) != 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")
    return digests


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _divided(tensors: Sequence[Planned], most: int) -> Iterator[list[Planned]]:
    shard: list[Planned] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.size > most:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.size
    yield shard


def _header(tensors: Sequence[Planned]) -> bytes:
    end = 0
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        start, end = end, end + tensor.size
        kind, shape = KINDS[tensor.dtype], list(tensor.shape)
        fields[tensor.name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class _Hashing:
    """An unbuffered file, with the digest of what was written to it."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._hash = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        """Write all of it: one call may take a part."""
        self._hash.update(data)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal."""
        return self._hash.hexdigest()


def _write(path: Path, tensors: Sequence[Planned], progress: Callable[[int], None]) -> str:
    done = 0
    with path.open("wb", buffering=0) as file:
        out = _Hashing(file)
        out.write(_header(tensors))
        for tensor in tensors:
            made = tensor.read()
            if made.dtype != tensor.dtype or tuple(made.shape) != tensor.shape:
                raise ModelError(f"{tensor.name} has changed while it was read")
            data = made.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), _PIECE):
                piece = data[start : start + _PIECE]
                out.write(piece)
                done += len(piece)
                progress(done)
    return out.digest
