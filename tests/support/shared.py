"""Folders that all processes of a run share: each is made once, by who asks for it first."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shared:
    """Folders by name, below `root`. Who wants to change one copies it."""

    root: Path

    def folder(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of that name, which `make` has filled; others wait while one makes it."""
        folder, unfinished = self.root / name, self.root / f"{name}.unfinished"
        with (self.root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder
