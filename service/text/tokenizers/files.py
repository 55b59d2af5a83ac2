"""Files that others have written: read up to a bound, and only if they are regular files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

#: Bytes of a vocabulary's file (the largest in use have 40 MB), and of any other that is read.
MOST_VOCABULARY_BYTES = 256 * 2**20
MOST_CONFIG_BYTES = 16 * 2**20


class TokenizerError(Exception):
    """A folder's tokenizer can't be used; one line that names the file."""


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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an empty one if there is no such file. Raises TokenizerError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_bounded(path, MOST_CONFIG_BYTES))
    except (UnreadableFile, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} can't be read: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def one_line(error: BaseException) -> str:
    """What `error` says, or else its kind."""
    return " ".join(str(error).split()) or type(error).__name__
