"""SHA256SUMS: the digests of a model folder's files, in the format of `sha256sum`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

MANIFEST = "SHA256SUMS"

#: `sha256sum` marks binary files with an asterisk, and names with line ends with a backslash.
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^\\\n]+)")
_MOST_BYTES = 16 << 20


class ManifestError(Exception):
    """A manifest can't be read, or a file is not what it says; one line."""


def read_manifest(folder: Path) -> dict[str, str] | None:
    """The digest (hexadecimal) of each file, by its path below `folder`; None: no manifest.

    Raises ManifestError for a file that is no manifest.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ManifestError(f"{path}: larger than {_MOST_BYTES >> 20} MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except UnicodeError:
        raise ManifestError(f"{path}: not UTF-8") from None
    except OSError as error:
        raise ManifestError(f"{path}: can't be read ({error.strerror})") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise ManifestError(f"{path}: line {number} is not a digest and a name")
        digests[found[2].removeprefix("./")] = found[1]
    return digests


def write_manifest(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of files by their paths below `folder`."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    (folder / MANIFEST).write_text("".join(lines), encoding="utf-8")


def digest_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal; OSError if it can't be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(folder: Path, name: str, digests: Mapping[str, str]) -> None:
    """Raise ManifestError unless the file `name` in `folder` has the digest that it should."""
    if name not in digests:
        raise ManifestError(f"{folder / name}: {MANIFEST} does not list it")
    try:
        found = digest_of(folder / name)
    except OSError as error:
        raise ManifestError(f"{folder / name}: can't be read ({error.strerror})") from None
    if found != digests[name]:
        raise ManifestError(
            f"{folder / name}: its SHA-256 is {found}, and {MANIFEST} says {digests[name]}"
        )
