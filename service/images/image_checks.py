"""Every limit on a request's images that can be checked without decoding them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.headers import Header, ImageError, read_header

#: The longer side of an image by the shorter: beyond, processors make strips of nothing, or fail.
MOST_RATIO = 200


def check_count(images: Sequence[GivenImage], settings: ServerSettings) -> None:
    """Raise InvalidArgument for more images than a request may have."""
    if len(images) > settings.max_images:
        problem = (
            f"is image {settings.max_images + 1} of {len(images)}; this server allows"
            f" {settings.max_images} (--max-images)"
        )
        raise InvalidArgument(images[settings.max_images].field, problem)


def check_image(image: GivenImage, settings: ServerSettings) -> Header:
    """What its header says. Takes microseconds.

    Raises InvalidArgument, which names the image, its value and the limit.
    """
    size, most = len(image.data), settings.max_image_bytes
    if size > most:
        problem = f"has {size} bytes; this server allows {most} (--max-image-bytes)"
        raise InvalidArgument(image.field, problem)
    try:
        header = read_header(image.data)
    except ImageError as error:
        raise InvalidArgument(image.field, str(error)) from None
    pixels, most = header.width * header.height, settings.max_image_pixels
    shown = f"{header.width} x {header.height}"
    if pixels > most:
        problem = f"has {shown} pixels; this server allows {most} in all (--max-image-pixels)"
        raise InvalidArgument(image.field, problem)
    longer, shorter = max(header.width, header.height), min(header.width, header.height)
    if longer > MOST_RATIO * shorter:
        problem = f"has {shown} pixels; one side may be {MOST_RATIO} times the other"
        raise InvalidArgument(image.field, problem)
    return header
