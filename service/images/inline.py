"""Images within a text, as TGI's routers write them: `![](data:image/png;base64,...)`."""

from __future__ import annotations

import base64
import binascii
import re
from typing import NamedTuple

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage

#: Markdown's image with a data URL (RFC 2397); others are text.
_INLINE = re.compile(r"!\[[^\]\n]*\]\(data:[^,)\s]{0,100};base64,([^)\s]*)\)")


class TextWithImages(NamedTuple):
    """A text, its images, and where they stand in it: offsets, rising."""

    text: str
    images: list[GivenImage]
    places: list[int]


def cut_out(text: str, field: str) -> TextWithImages:
    """Take the images out of a text. Raises InvalidArgument for one that is no base64."""
    parts: list[str] = []
    images: list[GivenImage] = []
    places: list[int] = []
    size = end = 0
    for at, found in enumerate(_INLINE.finditer(text)):
        parts.append(text[end : found.start()])
        size += len(parts[-1])
        places.append(size)
        name = f"{field}: image {at + 1}"
        try:
            images.append(GivenImage(base64.b64decode(found[1], validate=True), name))
        except binascii.Error:
            raise InvalidArgument(name, "is no base64") from None
        end = found.end()
    return TextWithImages("".join([*parts, text[end:]]), images, places)
