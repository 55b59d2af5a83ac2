"""The adapters that an operator names: where they lie."""

from __future__ import annotations

from pathlib import Path

from tokenpod.core.adapter_files import CONFIG
from tokenpod.service.config.resolved import named_adapters
from tokenpod.service.pod.model_store import ModelNotFound, snapshot_of


def adapter_folders(named: str | None) -> list[tuple[str, str]]:
    """Names and folders of what `--lora-adapters` says. Raises ModelNotFound."""
    return [(name, str(_folder(name, place))) for name, place in named_adapters(named)]


def _folder(name: str, place: str) -> Path:
    folder, asked = Path(place).expanduser(), f"--lora-adapters names {name}"
    if not folder.is_dir():
        path, _, revision = place.rpartition("@")
        folder = snapshot_of(path or place, revision if path else "main", asked)
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{asked}: the folder {folder} has no {CONFIG}")
    return folder
