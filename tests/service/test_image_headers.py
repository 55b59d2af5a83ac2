"""What is refused of images by their first bytes, before anything is decoded."""

from __future__ import annotations

import pytest

from support.images.files import file_of, moving, picture, png
from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.calls.images import GivenImage
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.images.headers import ImageError, read_header
from tokenpod.service.images.image_checks import check_count, check_image

pytestmark = pytest.mark.unit

FIELD = "chat.messages[0].content[1].image.data"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (37, 5), (3, 300)])
def test_a_header_says_the_size(kind: str, size: tuple[int, int]) -> None:
    assert read_header(file_of(picture(*size), kind)) == (kind, *size)


def test_all_kinds_of_webp_say_their_size() -> None:
    image = picture(37, 5, mode="RGBA")
    kinds = {
        b"VP8 ": file_of(picture(37, 5), "WEBP"),
        b"VP8L": file_of(image, "WEBP", lossless=True),
        b"VP8X": file_of(image, "WEBP", icc_profile=b"x" * 128),
    }
    for kind, data in kinds.items():
        assert data[12:16] == kind
        assert read_header(data) == ("WEBP", 37, 5)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"GIF89a" + bytes(99), "is GIF; PNG, JPEG and WebP are taken"),
        (b"<svg xmlns=''/>", "is SVG or XML; "),
        (b"\0\0\0\x1cftypavif", "is AVIF; "),
        (b"hello", "is of no known format; "),
        (png(0, 5, b""), "says that it has 0 x 5 pixels"),
        (png(5, 5, b"")[:20], "has 20 bytes and ends within its header"),
        (b"\xff\xd8\xff\xd9", r"has no frame header \(SOF\)"),
        (b"\xff\xd8" + b"\xff\xe0\0\2" * 5000, "has more than 1024 segments"),
        (b"\xff\xd8\xff\xe0\0\1", "has a segment of 1 bytes at byte 4"),
        (moving("WEBP"), "is an animation"),
    ],
)
def test_what_is_no_image_is_refused_by_its_first_bytes(data: bytes, problem: str) -> None:
    with pytest.raises(ImageError, match=problem):
        read_header(data)


@pytest.mark.parametrize(
    ("data", "limits", "problem"),
    [
        (png(70_000, 70_000, b""), {}, "has 70000 x 70000 pixels; this server allows 33554432 in"),
        (png(2**31 - 1, 1, b""), {}, r"pixels; this server allows .* \(--max-image-pixels\)"),
        (png(4020, 20, b""), {}, "has 4020 x 20 pixels; one side may be 200 times the other"),
        (bytes(2000), {"max_image_bytes": 1999}, r"2000 bytes; .* 1999 \(--max-image-bytes\)"),
    ],
)
def test_limits_hold_before_anything_is_decoded(
    data: bytes, limits: dict[str, int], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem) as refused:
        check_image(GivenImage(data, FIELD), ServerSettings(**limits))
    assert str(refused.value).startswith(FIELD)


def test_the_image_beyond_the_number_is_named() -> None:
    images = [GivenImage(b"", f"part[{at}]") for at in range(5)]
    with pytest.raises(InvalidArgument, match=r"^part\[2\] is image 3 of 5; .* 2 \(--max-images\)"):
        check_count(images, ServerSettings(max_images=2))
