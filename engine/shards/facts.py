"""What all ranks of a group must agree on, in words that a refusal can quote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import tokenpod
from tokenpod.core.adapter_files import digest_of
from tokenpod.core.messages import MTP, EngineOptions

#: Of the messages in protos/tokenpod/shard/v1.
PROTOCOL = 4

#: Options that each rank may have its own way. A new option must agree unless it is named here.
_LOCAL = frozenset(
    {"model_folder", "device", "threads", "memory_fraction", "placement", "questions_fd"}
    | {"adapters", "adapter_folder", "draft_folder"}
)
_DIGITS = 12
_INDEX = "model.safetensors.index.json"


def facts_of(options: EngineOptions) -> dict[str, str]:
    """Name -> value of everything that must be the same on every rank.

    Weights are known by their files' names and sizes: to read them all takes as long as to load.
    Where the files lie may differ.
    """
    folder = Path(options.model_folder)
    return {
        "release": tokenpod.__version__,
        "config.json": _digest(_canonical(folder / "config.json")),
        "weights": _weights(folder),
        "draft model": _draft(options.draft_folder),
        "device": options.device.partition(":")[0],
        "adapters": ", ".join(f"{name} {_adapter(folder)}" for name, folder in options.adapters),
        **{
            name: _text(getattr(options, name))
            for name in options.__struct_fields__
            if name not in _LOCAL
        },
    }


def _draft(folder: str | None) -> str:
    if folder is None or folder == MTP:
        return folder or "none"
    config = _digest(_canonical(Path(folder) / "config.json"))
    return f"{config}, {_weights(Path(folder))}"


def difference(ours: Mapping[str, str], theirs: Mapping[str, str], rank: int) -> str | None:
    """What differs, with both values, in one line; None: nothing does."""
    faults = [
        f"{name} is {ours.get(name, 'unknown')} at the leader and"
        f" {theirs.get(name, 'unknown')} at rank {rank}"
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if ours.get(name) != theirs.get(name)
    ]
    return "; ".join(faults) or None


def _weights(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    sizes = [(file.name, file.stat().st_size) for file in files]
    total = sum(size for _, size in sizes)
    index = folder / _INDEX
    digest = _digest(json.dumps(sizes).encode() + (_canonical(index) if index.exists() else b""))
    return f"{digest} ({total} bytes in {len(files)} files)"


def _adapter(folder: str) -> str:
    """What names an adapter's content; one that can't be read has none, and fails later."""
    try:
        return digest_of(Path(folder))[:_DIGITS]
    except OSError:
        return "unread"


def _canonical(file: Path) -> bytes:
    """A JSON file's content, whatever its spaces and order; a broken or missing one's is empty."""
    try:
        return json.dumps(json.loads(file.read_bytes()), sort_keys=True).encode()
    except (OSError, ValueError):
        return b""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def _text(value: object) -> str:
    return "not set" if value is None else str(value)
