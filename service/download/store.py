"""What a download reads from: a hub's repository, or a folder of an object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol


class DownloadError(Exception):
    """It can't be downloaded; one line. `resumable`: what is there serves the next try."""

    def __init__(self, text: str, *, resumable: bool = False) -> None:
        super().__init__(" ".join(text.split()))
        self.resumable = resumable


@dataclass(frozen=True, slots=True)
class Remote:
    """A file of a store.

    Attributes:
        name: its path below the model.
        size: in bytes.
        version: changes with its content.
        sha256: its digest, where the store knows it.
    """

    name: str
    size: int
    version: str
    sha256: str | None = None


class Store(Protocol):
    """Where a model's files come from. Methods raise DownloadError."""

    @property
    def source(self) -> str:
        """The model's address."""
        ...

    @property
    def revision(self) -> str | None:
        """The revision that was asked for; None where there are none."""
        ...

    def files(self) -> Sequence[Remote]:
        """Every file of the model. Asked first: it finds the revision."""
        ...

    def fetch(self, file: Remote, out: BinaryIO, offset: int) -> None:
        """Append a file's bytes from `offset` on to `out`, which may be rewound and cut to 0."""
        ...
