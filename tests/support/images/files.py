"""Image files made in tests: valid ones of every kind that is read, and what must be refused."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours that no other seed has."""
    draw = np.random.default_rng(seed)
    few = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(few).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def file_of(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:  # noqa: A002
    """The bytes of its file."""
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG, with the right sum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int, height: int, rows: bytes, *more: bytes, depth: int = 8, colour: int = 2
) -> bytes:
    """A PNG that says of itself what it is told to; `rows` is what its image data unpack to."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows, 9))
    return SIGNATURE + chunk(b"IHDR", header) + b"".join(more) + data + chunk(b"IEND", b"")


def moving(kind: str, frames: int = 2) -> bytes:
    """An animation."""
    images = [picture(8, 8, seed) for seed in range(frames)]
    return file_of(images[0], kind, save_all=True, append_images=images[1:])


def webp_canvas(data: bytes, width: int, height: int) -> bytes:
    """An extended WebP that says another size than its frame has."""
    assert data[12:16] == b"VP8X"
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return data[:24] + size + data[30:]


def sideways(image: Image.Image) -> bytes:
    """A JPEG that is stored lying on its side, as telephones do."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(image.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)


def valid(draw: random.Random) -> bytes:
    """Any kind that is read."""
    size = draw.choice((1, 2, 3, 7, 40)), draw.choice((1, 3, 8, 33))
    mode = draw.choice(("RGB", "L", "RGBA", "P", "1", "CMYK"))
    kind = draw.choice(("PNG", "JPEG", "WEBP"))
    if kind == "JPEG" and mode in ("RGBA", "P", "1"):
        mode = "L"
    if kind in ("WEBP", "PNG") and mode == "CMYK":
        mode = "RGB"
    image = picture(*size, draw.randrange(1 << 16), mode)
    if kind == "WEBP":
        return file_of(image, kind, lossless=draw.random() < 0.5)
    if kind == "JPEG":
        return file_of(image, kind, progressive=draw.random() < 0.5, quality=draw.choice((5, 90)))
    return file_of(image, kind)


def _odd(draw: random.Random) -> bytes:
    """Valid, and rare: 16 bits, palettes with alpha, orientations, profiles, chunks, strips."""
    return draw.choice(
        (
            lambda: file_of(Image.fromarray(np.full((9, 5), draw.randrange(1 << 16), np.uint16))),
            lambda: png(3, 2, bytes(2 * (1 + 3 * 6)), depth=16),
            lambda: png(3, 2, bytes(2 * (1 + 3 * 8)), depth=16, colour=6),
            lambda: png(9, 1, bytes(1 + 2), depth=1, colour=0),
            lambda: file_of(picture(9, 7, 1, "LA")),
            lambda: file_of(picture(9, 7, 1, "P"), transparency=bytes(range(16))),
            lambda: file_of(picture(40, 1, 2, "CMYK"), "JPEG"),
            lambda: oriented(draw.randrange(10)),
            lambda: file_of(picture(30, 20, 3), "JPEG", exif=b"Exif\0\0" + draw.randbytes(99)),
            lambda: file_of(picture(30, 20, 4), "PNG", icc_profile=draw.randbytes(300_000)),
            lambda: file_of(picture(30, 20, 4), "JPEG", icc_profile=draw.randbytes(500_000)),
            lambda: png(2, 2, bytes(2 * 7), chunk(b"tEXt", b"a\0b") * 10_000),
            lambda: png(2, 2, bytes(2 * 7), chunk(b"eXIf", draw.randbytes(40))),
            lambda: file_of(picture(*draw.choice(((1, 200), (200, 1), (2, 399), (30_000, 150))))),
        )
    )()


def oriented(orientation: int) -> bytes:
    """A JPEG that says how it lies; 0 and 9 mean nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(picture(30, 20, 5), "JPEG", exif=exif)


def _too_long(draw: random.Random) -> bytes:
    """One pixel thin; as a file of so many pixels, or by its header alone."""
    sides = draw.choice(((1, 30_000), (30_000, 1), (1, 201)))
    return draw.choice((png(*sides, b""), file_of(picture(*sides))))


@functools.cache
def _whole() -> tuple[bytes, ...]:
    """Of each format, large enough to be cut anywhere."""
    image = picture(90, 70, 6)
    return tuple(file_of(image, kind) for kind in ("PNG", "JPEG", "WEBP"))


def tenths() -> list[bytes]:
    """Files of each format, cut at every tenth of them."""
    return [data[: len(data) * tenth // 10] for data in _whole() for tenth in range(10)]


def _cut(draw: random.Random) -> bytes:
    data = valid(draw)
    return data[: draw.randrange(len(data))]


def _flipped(draw: random.Random) -> bytes:
    data = bytearray(valid(draw))
    for _ in range(draw.choice((1, 3, 20))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _spliced(draw: random.Random) -> bytes:
    one, other = valid(draw), valid(draw)
    return one[: draw.randrange(len(one))] + other[draw.randrange(len(other)) :]


def _lying(draw: random.Random) -> bytes:
    wide, high = draw.choice((1, 5000, 2**31 - 1)), draw.choice((1, 5000, 2**31))
    return png(wide, high, bytes(4 * 4), depth=draw.choice((8, 16, 7)), colour=draw.choice((2, 3)))


def _bomb(draw: random.Random) -> bytes:
    """Little to read, and much to unpack: in the rows, in a text, in a profile."""
    kind, before = draw.choice(((b"zTXt", b"a\0\0"), (b"iCCP", b"a\0\0"), (b"IDAT", b"")))
    return png(2, 2, bytes(2 * 7), chunk(kind, before + _much()))


@functools.cache
def _much() -> bytes:
    return zlib.compress(bytes(1 << 26), 1)


def _animated(draw: random.Random) -> bytes:
    return moving(draw.choice(("PNG", "WEBP", "GIF")), 3)


def _random(draw: random.Random) -> bytes:
    begin = draw.choice((b"", SIGNATURE, b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8 ", b"GIF89a"))
    return begin + draw.randbytes(draw.choice((0, 1, 40, 4000)))


def _segments(draw: random.Random) -> bytes:
    """A JPEG whose header never ends."""
    return b"\xff\xd8" + draw.choice((b"\xff\xe0\0\2", b"\xff", b"\xff\xd0")) * 200_000


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    *(valid, _cut, _flipped, _odd, _flipped, _spliced, _lying, _animated, _random, _segments),
    *(_bomb, _too_long, lambda draw: draw.choice(tenths())),
)


def hostile(count: int, seed: int) -> Iterator[bytes]:
    """So many files, of every kind in turn."""
    draw = random.Random(seed)
    for at in range(count):
        yield KINDS[at % len(KINDS)](draw)
