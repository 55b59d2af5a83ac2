"""Images as a call has them: encoded bytes, which nobody has looked into yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image of a request.

    Args:
        data: the file's bytes; empty, with a `uri`.
        field: where the client put it, for errors.
        uri: where they are to be fetched from.
    """

    data: bytes
    field: str
    uri: str = ""


def image_bytes(images: Sequence[GivenImage], most: int) -> int:
    """Bytes of their files; `most`: of one that is to be fetched."""
    return sum(most if image.uri else len(image.data) for image in images)
