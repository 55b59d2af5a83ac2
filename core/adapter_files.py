"""The files of an adapter in PEFT's layout, and what names their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_READ_AT_ONCE = 1 << 20


def folder_within(root: str, path: str) -> Path:
    """The folder `path` below `root`, wherever links lead; ValueError if it is not below it."""
    above = Path(root).resolve()
    folder = (above / path).resolve()
    if folder == above or not folder.is_relative_to(above):
        raise ValueError(f"{path[:200]!r} is no folder below the folder of adapters")
    return folder


def digest_of(folder: Path) -> str:
    """SHA-256, in hexadecimal digits, of the SHA-256s of both files. Raises OSError."""
    whole, block = hashlib.sha256(), memoryview(bytearray(_READ_AT_ONCE))
    for name in (CONFIG, WEIGHTS):
        own = hashlib.sha256()
        with (folder / name).open("rb", buffering=0) as file:
            while read := file.readinto(block):
                own.update(block[:read])
        whole.update(own.digest())
    return whole.hexdigest()
