"""Images as a call has them: encoded bytes, which nobody has looked into yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a request.

    Args:
        data: the file's bytes.
        field: where the client put it, for errors.
    """

    data: bytes
    field: str


def image_bytes(images: Sequence[GivenImage]) -> int:
    """Bytes of their files."""
    return sum(len(image.data) for image in images)
