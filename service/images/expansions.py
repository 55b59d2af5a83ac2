"""What stands for images in a rendered chat. Text workers import it, and so it imports no gRPC."""

from __future__ import annotations

import msgspec


class ImageTexts(msgspec.Struct, frozen=True, array_like=True):
    """What a rendered chat has in place of its images. It travels to the text workers.

    Args:
        token: what a chat template writes for an image. A client's texts must not have it.
        expansions: what takes its place, one for each image.
    """

    token: str
    expansions: list[str]


def no_token(token: str) -> str:
    """What is wrong with a text that has a token for images."""
    return f"has {token!r}, which stands for an image and can't be written as text"
