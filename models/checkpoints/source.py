"""What is converted: each kind of source says which tensors it has, and makes the small files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenpod.core.model_files import small_files
from tokenpod.models.checkpoints.checkpoint import files_of
from tokenpod.models.checkpoints.errors import ModelError
from tokenpod.models.checkpoints.writer import KINDS, Planned

_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


class Source(Protocol):
    """A checkpoint. Methods raise ModelError."""

    def tensors(self) -> Sequence[Planned]:
        """Its tensors under the names that the result has."""
        ...

    def write_small_files(self, folder: Path) -> None:
        """Write settings and tokenizer into the result's folder."""
        ...


class Safetensors:
    """A folder of safetensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tensors(self) -> Sequence[Planned]:
        """All of them, in the files' order."""
        return [tensor for path in files_of(self._folder) for tensor in tensors_of(path)]

    def write_small_files(self, folder: Path) -> None:
        """The same files."""
        copy_small_files(self._folder, folder)


def tensors_of(path: Path) -> list[Planned]:
    """The tensors of a safetensors file; ModelError if it is none."""
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error})") from None
    found = []
    for name in file.keys():  # noqa: SIM118 - it is no dictionary
        stored = file.get_slice(name)
        kind = stored.get_dtype()
        if kind not in _DTYPES:
            raise ModelError(f"{path}: {name} holds {kind} numbers, which are not supported")
        shape = tuple(stored.get_shape())
        found.append(Planned(name, _DTYPES[kind], shape, partial(_read, file, name)))
    return found


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy settings, tokenizer and chat templates; ModelError for one that can't be read."""
    names = small_files(source)
    if "config.json" not in names:
        raise ModelError(f"{source} is no model: it has no config.json")
    copy_files(source, names, folder)


def copy_files(source: Path, names: Iterable[str], folder: Path) -> None:
    """Copy files of `source`, by their paths below it."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)


def _read(file: Any, name: str) -> torch.Tensor:
    tensor = file.get_tensor(name)
    assert isinstance(tensor, torch.Tensor)
    return tensor
