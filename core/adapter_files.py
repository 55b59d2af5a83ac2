"""The files of an adapter in PEFT's layout, and what names their content."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import TracebackType

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
    return _digest(folder, threading.Event())


class Digesting:
    """The same, made by a thread of its own; whoever leaves the context has no use for it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._given_up = folder, threading.Event()
        self._found: str | OSError = ""
        self._thread = threading.Thread(target=self._run, name="adapter-digest", daemon=True)

    def __enter__(self) -> Digesting:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._given_up.set()
        self._thread.join()

    def result(self) -> str:
        """Wait for it. Raises OSError."""
        self._thread.join()
        if isinstance(self._found, OSError):
            raise self._found
        return self._found

    def _run(self) -> None:
        try:
            self._found = _digest(self._folder, self._given_up)
        except OSError as error:
            self._found = error


def _digest(folder: Path, given_up: threading.Event) -> str:
    whole, block = hashlib.sha256(), memoryview(bytearray(_READ_AT_ONCE))
    for name in (CONFIG, WEIGHTS):
        own = hashlib.sha256()
        with (folder / name).open("rb", buffering=0) as file:
            while not given_up.is_set() and (read := file.readinto(block)):
                own.update(block[:read])
        whole.update(own.digest())
    return whole.hexdigest()
