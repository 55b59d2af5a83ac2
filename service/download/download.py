"""From a store to a folder, which appears whole; what a killed download has got is kept."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from tokenpod.core.manifest import digest_of, write_manifest
from tokenpod.core.model_files import ORIGIN, is_small, is_weights
from tokenpod.core.staging import Finished, StagingError, staging
from tokenpod.service.download.store import DownloadError, Remote, Store

log = logging.getLogger("tokenpod")

_FILES_AT_ONCE = 8

#: Told bytes that are there, and in all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A model's folder, and how many bytes had to be fetched for it: 0 if it was there."""

    folder: Path
    fetched: int


def download(
    store: Store, target: Path, progress: Progress, *, pickles: bool = False
) -> Downloaded:
    """Make `target` a model's folder: the files that a server reads, and their SHA256SUMS.

    A folder with the same origin is left as it is, without asking the store.

    Args:
        store: where the model is.
        target: a folder that does not exist yet; the one above is made if need be.
        progress: called from several threads.
        pickles: take `pytorch_model*.bin` where there are no safetensors.

    Raises DownloadError. Unless it is resumable, nothing is left behind.
    """
    origin = {"source": store.source, "revision": store.revision}
    try:
        if _is_there(target, origin):
            return Downloaded(target, 0)
        with staging(target, keep=True, waiting=lambda: _tell_waiting(target)) as part:
            try:
                run = _Download(store, part.folder, progress)
                run.fill(_wanted(store, pickles=pickles), origin)
                part.finish()
            except DownloadError as error:
                part.keep = error.resumable and any(part.folder.iterdir())
                raise
            except OSError as error:
                part.keep = False
                raise DownloadError(_of_disk(error, target)) from None
            return Downloaded(target, run.fetched)
    except Finished:
        # It may be the same one.
        return download(store, target, progress, pickles=pickles)
    except StagingError as error:
        raise DownloadError(str(error)) from None


def _tell_waiting(target: Path) -> None:
    log.info("another process downloads it; waiting", extra={"folder": str(target)})


def _is_there(target: Path, origin: dict[str, str | None]) -> bool:
    """Whether it has been downloaded already; DownloadError if something else is there."""
    if not target.exists():
        return False
    try:
        found = json.loads((target / ORIGIN).read_bytes())
    except (OSError, ValueError):
        raise DownloadError(f"{target} exists already, and was not downloaded") from None
    if isinstance(found, dict) and {**found, **origin} == found:
        return True
    there = found.get("source") if isinstance(found, dict) else None
    at = f" at {found['revision']}" if there and found.get("revision") else ""
    raise DownloadError(f"{target} exists already, and holds {there}{at}")


def _wanted(store: Store, *, pickles: bool) -> list[Remote]:
    """The files that a server reads, by name; DownloadError if they are no model."""
    files = store.files()
    names = {file.name for file in files}
    if "config.json" not in names:
        raise DownloadError(f"{store.source} is no model: it has no config.json")
    if not any(name.endswith(".safetensors") and is_weights(name) for name in names):
        known = [name for name in sorted(names) if is_weights(name, pickles=True)]
        pickled = [name for name in known if not name.endswith(".json")]
        if not pickled:
            raise DownloadError(f"{store.source} is no model: it has no safetensors")
        if not pickles:
            hint = "--pickles takes it, for tokenpod convert"
            raise DownloadError(f"{store.source} has weights as {pickled[0]} alone; {hint}")
    else:
        pickles = False
    wanted = [f for f in files if is_small(f.name) or is_weights(f.name, pickles=pickles)]
    return sorted(wanted, key=lambda file: file.name)


class _Download:
    """One try at filling `folder`."""

    def __init__(self, store: Store, folder: Path, progress: Progress) -> None:
        self._store, self._folder, self._progress = store, folder, progress
        self.fetched = 0
        self._total = 0
        self._there: dict[str, int] = {}

    def fill(self, files: Sequence[Remote], origin: dict[str, str | None]) -> None:
        """Fetch what is missing; DownloadError, OSError."""
        self._begin(files, origin)
        with ThreadPoolExecutor(_FILES_AT_ONCE, "download") as pool:
            futures = [pool.submit(self._file, file) for file in files]
            try:
                digests = [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        write_manifest(self._folder, {f.name: d for f, d in zip(files, digests, strict=True)})
        (self._folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")

    def _begin(self, files: Sequence[Remote], origin: dict[str, str | None]) -> None:
        """Keep what an earlier try has got of these files, and nothing else.

        Until all are there, the origin's file tells their versions too.
        """
        now = {file.name: [file.version, file.size] for file in files}
        try:
            before = json.loads((self._folder / ORIGIN).read_bytes())
            versions = before["files"] if {**before, **origin} == before else {}
        except (OSError, ValueError, KeyError, TypeError):
            versions = {}
        kept = {name for name, about in now.items() if versions.get(name) == about}
        for path in list(self._folder.rglob("*")):
            if path.is_file() and str(path.relative_to(self._folder)) not in kept:
                path.unlink()
        (self._folder / ORIGIN).write_text(json.dumps({**origin, "files": now}))
        self._total = sum(file.size for file in files)
        self._there = {file.name: self._size(file) for file in files}
        missing = self._total - sum(self._there.values())
        free = shutil.disk_usage(self._folder).free
        if missing > free:
            text = f"{self._folder.parent}: {missing:,} bytes are to be downloaded"
            raise DownloadError(f"{text}, and the disk has room for {free:,}")

    def _size(self, file: Remote) -> int:
        """Bytes of a file that are there. Text may be compressed on its way: it is not resumed."""
        path = self._folder / file.name
        size = path.stat().st_size if path.is_file() else 0
        return size if size == file.size or (is_weights(file.name) and size < file.size) else 0

    def _file(self, file: Remote) -> str:
        """Fetch the rest of a file; its digest."""
        path, offset = self._folder / file.name, self._there[file.name]
        path.parent.mkdir(exist_ok=True)
        if offset < file.size or not path.exists():
            with path.open("r+b" if offset else "wb", buffering=0) as out:
                out.seek(offset)
                self._store.fetch(file, cast(BinaryIO, _Counted(out, self, file.name)), offset)
        if path.stat().st_size != file.size:
            path.unlink()
            raise DownloadError(f"{self._store.source}/{file.name} has changed meanwhile")
        digest = digest_of(path)
        if file.sha256 is not None and digest != file.sha256:
            path.unlink()
            text = f"{self._store.source}/{file.name}: its SHA-256 is {digest}"
            raise DownloadError(f"{text}, and the hub says {file.sha256}", resumable=True)
        return digest

    def count(self, name: str, position: int, written: int) -> None:
        """`written` more bytes of a file are there, which now has `position`."""
        self.fetched += written
        self._there[name] = position
        self._progress(sum(self._there.values()), self._total)


class _Counted:
    """A file that tells of what is written to it."""

    def __init__(self, file: Any, download: _Download, name: str) -> None:
        self._file, self._download, self._name = file, download, name

    def write(self, data: bytes) -> int:
        """Write all of it: an unbuffered file may take a part."""
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self._download.count(self._name, self._file.tell(), len(data))
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _of_disk(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{target}: no room is left for it ({os.strerror(error.errno)})"
    return f"{target}: can't be written ({error.strerror or error})"
