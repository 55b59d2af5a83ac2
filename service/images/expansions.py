"""What stands for images in a rendered chat. Text workers import it, and so it imports no gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

#: How an image stands in a prompt: texts, and how many of its rows follow each.
Layout = tuple[tuple[str, int], ...]


def rows_of(layout: Layout) -> int:
    """How many rows of embeddings an image with this layout has."""
    return sum(rows for _, rows in layout)


class ImageTexts(msgspec.Struct, frozen=True, array_like=True):
    """What a rendered chat has in place of its images. It travels to the text workers.

    Args:
        token: what a chat template writes for an image.
        row: the text of a row. A client's texts must have neither.
        expansions: what takes the token's place, one for each image.
    """

    token: str
    row: str
    expansions: list[str]

    def forbidden(self, text: str) -> str:
        """What is wrong with a text of a client; empty: nothing."""
        return no_token(text, (self.token, self.row))


def no_token(text: str, tokens: Sequence[str]) -> str:
    """What is wrong with a text that has a token for images; empty: nothing."""
    found = next((token for token in tokens if token in text), None)
    return (
        ""
        if found is None
        else f"has {found!r}, which stands for an image and can't be written as text"
    )
