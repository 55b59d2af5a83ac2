"""One safetensors file: its header, which is not trusted, and its tensors, read in pieces.

Format: https://github.com/huggingface/safetensors#format. The header is checked before anything is
allocated: every tensor lies in the file, has as many bytes as its shape and type say, and begins
where the one before ends. Files are read rather than mapped, so one that is cut while it is read is
an error and no signal.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.pieces import Pieces

#: Numbers by what the format calls their kinds.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Bytes of a header: 100,000 tensors with long names have a tenth.
_MOST_HEADER_BYTES = 32 << 20
_MOST_AXES = 16

#: Called after each little piece of work, by readers whom others must not notice; it may sleep.
Rest = Callable[[], None]


def no_rest() -> None:
    """Nobody else is there."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its kind of numbers as the format names it, and where it lies."""

    kind: str
    shape: tuple[int, ...]
    #: Byte of the file.
    start: int
    size: int


class TensorFile:
    """A safetensors file, open until closed. Raises ModelError for one that is not whole.

    Args:
        path: of the file.
        pieces: how tensors are read; None: by the caller's thread.
        rest: between entries of the header.
    """

    def __init__(self, path: Path, pieces: Pieces | None = None, rest: Rest = no_rest) -> None:
        self.name = path.name
        self._pieces = pieces or Pieces()
        try:
            # A pipe without a writer would not even open.
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file") from None
        except OSError as error:
            raise ModelError(f"{path}: can't be read ({error.strerror})") from None
        try:
            self.entries = _entries(self._file, rest)
        except (_Broken, OSError, RecursionError) as error:
            self.close()
            raise ModelError(f"{path}: not a whole safetensors file ({error})") from None

    def close(self) -> None:
        """Give the file back."""
        os.close(self._file)

    def read(
        self,
        target: torch.Tensor,
        name: str,
        first: int,
        row: tuple[int, ...],
        columns: range | None = None,
    ) -> None:
        """Fill `target`, contiguous, with rows of a tensor, in its dtype and on its device.

        Args:
            target: [rows, *row], or [rows, len(columns), *row[1:]].
            name: of the tensor.
            first: row of it, its numbers being [all rows, *row].
            row: shape of a row.
            columns: of each row; None: all.

        Raises:
            ModelError: the file has become shorter or can't be read.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.kind]
        if not target.numel():
            return
        start = entry.start + first * math.prod(row) * dtype.itemsize
        try:
            if columns is None and target.dtype == dtype and target.device.type == "cpu":
                self._pieces.fill(self._file, target, start)
            else:
                self._pieces.copy(self._file, target, start, dtype, row, columns)
        except EOFError:
            raise ModelError(
                f"{self.name}: {name} can't be read: the file ends before it"
            ) from None
        except OSError as error:
            raise ModelError(f"{self.name}: {name} can't be read ({error.strerror})") from None


class _Broken(Exception):
    """What is wrong with a header."""


#: How the file begins that a clone has where Git LFS is not installed.
_POINTER = b"version https://git-lfs"


def _entries(file: int, rest: Rest) -> dict[str, Entry]:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _Broken("it is not a regular file")
    if os.pread(file, len(_POINTER), 0) == _POINTER:
        raise _Broken("it is a pointer of Git LFS: `git lfs pull` fetches what it points to")
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if status.st_size < 8 or size > status.st_size - 8:
        raise _Broken(f"a header of {size} bytes in a file of {status.st_size}")
    if size > _MOST_HEADER_BYTES:
        raise _Broken(f"a header of {size} bytes; at most {_MOST_HEADER_BYTES} are read")
    try:
        header = json.loads(os.pread(file, size, 8))
    except ValueError as error:
        raise _Broken(f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _Broken("its header is no JSON object")
    header.pop("__metadata__", None)
    begin = 8 + size
    entries = {}
    for name, about in header.items():
        entries[name] = _entry(name, about, begin)
        rest()
    _check_places(entries, begin, status.st_size)
    return entries


def _entry(name: str, about: Any, begin: int) -> Entry:
    if not isinstance(about, dict):
        raise _Broken(f"{name[:80]} is no object")
    kind, shape = about.get("dtype"), _sizes(about.get("shape"), name)
    offsets = _sizes(about.get("data_offsets"), name)
    if not isinstance(kind, str) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise _Broken(f"{name[:80]} has the dtype {str(kind)[:20]!r} and data_offsets {offsets}")
    size = offsets[1] - offsets[0]
    if kind in DTYPES and math.prod(shape) * DTYPES[kind].itemsize != size:
        raise _Broken(f"{name[:80]} of {kind} and shape {list(shape)} has {size} bytes")
    return Entry(kind, shape, begin + offsets[0], size)


def _sizes(value: Any, name: str) -> tuple[int, ...]:
    """Lengths of axes, or places in the file."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:
        raise _Broken(f"{name[:80]} has no shape and data_offsets of at most {_MOST_AXES} numbers")
    if not all(type(item) is int and 0 <= item < 1 << 62 for item in value):
        raise _Broken(f"{name[:80]} has a shape or data_offsets that can't be")
    return tuple(value)


def _check_places(entries: dict[str, Entry], begin: int, end: int) -> None:
    """Each begins where the one before ends, and the last one at the file's end."""
    for name, entry in sorted(entries.items(), key=lambda x: (x[1].start, x[1].size)):
        if entry.start != begin:
            raise _Broken(f"{name[:80]} begins at byte {entry.start}, not at {begin}")
        begin += entry.size
    if begin != end:
        raise _Broken(f"its tensors end at byte {begin}, and it at {end}")
