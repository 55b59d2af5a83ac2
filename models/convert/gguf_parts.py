"""The files of a GGUF model: one, or several as llama.cpp's gguf-split names and numbers them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenpod.models.checkpoints.errors import ModelError

#: A part's name: which it is, from 1, and how many there are.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that this one is of, in their order; ModelError if one is missing."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    # The folder says how many there can be, whatever the name says.
    there = {each.name for each in path.parent.glob("*.gguf")}
    parts: list[Path] = []
    for number in range(1, count + 1):
        name = f"{stem}-{number:05d}-of-{count:05d}.gguf"
        if name not in there:
            raise ModelError(f"{path.parent / name} is missing: the model has {count} files")
        parts.append(path.parent / name)
    return parts


def read_parts(path: Path) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """Values by name, which the first file has, and the tensors of all, as the library has them.

    Raises ModelError for what is no GGUF file, and for parts that are not of one model.
    """
    parts = parts_of(path)
    opened = [_read(part) for part in parts]
    tensors: dict[str, Any] = {}
    for number, (part, (values, own)) in enumerate(zip(parts, opened, strict=True)):
        told = values.get("split.no", 0), values.get("split.count", 0) or 1
        if told != (number, len(parts)):
            raise ModelError(
                f"{part}: it is part {told[0] + 1} of {told[1]} by its metadata, and"
                f" {number + 1} of {len(parts)} by its name"
            )
        for tensor in own:
            if tensor.name in tensors:
                raise ModelError(f"{part}: {tensor.name} is in a part before it, too")
            tensors[tensor.name] = tensor
    values = opened[0][0]
    total = values.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelError(f"{path}: its parts have {len(tensors)} tensors in all, not {total}")
    return values, [*tensors.values()]


def _read(path: Path) -> tuple[Mapping[str, Any], Sequence[Any]]:
    try:
        from gguf import GGUFReader
    except ImportError:
        hint = "pip install 'tokenpod[gguf]'"
        raise ModelError(f"{path}: GGUF files need the package gguf: {hint}") from None
    try:
        reader = GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except MemoryError:
        raise
    except Exception as error:
        # The library meets anything in what is no such file.
        raise ModelError(f"{path}: not a whole GGUF file ({error})") from None
