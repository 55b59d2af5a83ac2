"""A folder that appears whole, or not at all: it is filled beside its place, and renamed there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


class StagingError(Exception):
    """The folder can't be made; one line."""


class Finished(Exception):
    """Another process has made the folder meanwhile."""


@dataclass(slots=True)
class Staging:
    """A folder being filled.

    Attributes:
        target: where it will be.
        folder: where it is filled: `.NAME.part` beside the target, locked by its one writer.
        keep: whether what was filled stays when it is not finished, for the next try.
    """

    target: Path
    folder: Path
    keep: bool = False

    def finish(self) -> None:
        """Make all of it durable, and move it to its place. Raises OSError."""
        for path in (*self.folder.rglob("*"), self.folder):
            _sync(path)
        os.rename(self.folder, self.target)
        _sync(self.target.parent)


@contextlib.contextmanager
def staging(
    target: Path, *, keep: bool = False, waiting: Callable[[], None] | None = None
) -> Iterator[Staging]:
    """Fill a folder for `target`, which must not exist; the caller finishes it.

    What a writer before has left is there if `keep`, else it goes. Where an end without `finish`
    leaves what was filled is `Staging.keep`, which is `keep` at first.

    Args:
        target: the folder to make.
        keep: go on with what an earlier process has left.
        waiting: called before waiting for another process that fills the same folder; None:
            it is an error.

    Raises:
        StagingError: it exists, or can't be made, or another process makes it.
        Finished: another process has made it while this one waited.
    """
    target = target.absolute()
    if target.exists():
        raise StagingError(f"{target} exists already")
    folder = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(folder, target, waiting)
    except OSError as error:
        raise StagingError(f"{error.filename}: can't be made ({error.strerror})") from None
    made = Staging(target, folder, keep)
    try:
        if not keep:
            _empty(folder)
        yield made
    finally:
        if folder.exists() and not made.keep:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path, target: Path, waiting: Callable[[], None] | None) -> int:
    """The descriptor of `folder`, made if need be, with the lock."""
    told = False
    while True:
        if told and target.exists():
            raise Finished
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if not _lock(descriptor, wait=told):
                if waiting is None:
                    raise StagingError(f"{folder}: another process fills it")
                waiting()
                told = True
                _lock(descriptor, wait=True)
            # It may have been renamed or removed before we got it.
            if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    """Take the lock of a folder. File systems without locks for folders (NFS) go without."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN)
    return True


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
