"""What decides about kernels and steps of a start, and files that hold what was found of them."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

#: Where what decides about kernels is written: below the package.
_SOURCES = "core", "engine", "kernels", "models"


def conditions(model: Path) -> bytes:
    """A digest of the package's sources, of the versions of others, and of a model's settings."""
    found = hashlib.sha256(json.dumps([version("triton"), version("torch")]).encode())
    found.update(sources())
    for path in sorted(model.glob("*.json")):
        if "tokenizer" not in path.name:
            found.update(path.read_bytes())
    return found.digest()


@cache
def sources() -> bytes:
    """A digest of the package's sources. Some 400 files: 40 ms, and 200 beside busy threads."""
    found = hashlib.sha256()
    package = Path(str(files("tokenpod")))
    for part in _SOURCES:
        for path in sorted((package / part).rglob("*.*")):
            if path.suffix in (".py", ".json"):
                found.update(path.read_bytes())
    return found.digest()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: the process may be ended at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
