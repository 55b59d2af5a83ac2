"""Files that others have written: read as far as a bound, and only if they are files at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class UnreadableFile(Exception):
    """The file can't be read, is no regular file or is too large; the text says which."""


def read_bounded(path: Path, most: int) -> bytes:
    """All of a regular file of up to `most` bytes; links are followed.

    A device such as /dev/zero never ends, and a pipe keeps its reader waiting: both are refused.

    UnreadableFile: see there.
    """
    try:
        # A pipe without a writer would not even open.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableFile("it is not a regular file")
            if status.st_size > most:
                raise UnreadableFile(f"it has {status.st_size} bytes; at most {most} are read")
            data = file.read(most + 1)
    except OSError as error:
        raise UnreadableFile(error.strerror or type(error).__name__) from error
    if len(data) > most:
        raise UnreadableFile(f"it has more than {most} bytes")
    return data
