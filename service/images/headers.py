"""What the first bytes of an image's file say: its format and size. Nothing is decoded.

The format is recognised by content (PNG 3rd edition, 5.2; ITU-T T.81 annex B; RFC 9649); the name
or MIME type that a client gives does not count. Formats that are not served are recognised, too,
so that the error can name them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
#: Segments of a JPEG before its frame header: a camera writes a few dozen.
_MOST_SEGMENTS: Final = 1024
#: Markers of frame headers, and of segments without a length. Arithmetic coding is not read.
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
_ENTROPY: Final = frozenset({0xD9, 0xDA})
#: Of an extended WebP: it has several frames.
_ANIMATED: Final = 0x02

#: Formats that are not read, by what their files begin with.
_OTHERS: Final = (
    ("GIF", b"GIF8"),
    ("BMP", b"BM"),
    ("TIFF", b"II*\x00"),
    ("TIFF", b"MM\x00*"),
    ("PDF", b"%PDF"),
    ("JPEG XL", b"\xff\x0a"),
    ("JPEG XL", b"\x00\x00\x00\x0cJXL "),
    ("JPEG 2000", b"\x00\x00\x00\x0cjP  "),
    ("SVG or XML", b"<svg"),
    ("SVG or XML", b"<?xml"),
    ("PostScript", b"%!PS"),
)
#: What images may be.
FORMATS: Final = ("PNG", "JPEG", "WEBP")
_TAKEN: Final = "PNG, JPEG and WebP are taken"


class Header(NamedTuple):
    """What a file says of itself."""

    #: One of `FORMATS`.
    format: str
    #: In pixels, as stored: an orientation may exchange them.
    width: int
    height: int


class ImageError(ValueError):
    """What is wrong with an image, for the client, as a predicate: "is empty"."""


def read_header(data: bytes) -> Header:
    """What a file says of itself. Takes microseconds, whatever `data` holds.

    Raises ImageError for what is none of `FORMATS`, has several frames or no size, or ends early.
    """
    if not data:
        raise ImageError("is empty")
    try:
        if data.startswith(_PNG):
            header = Header("PNG", *_png(data))
        elif data.startswith(_JPEG):
            header = Header("JPEG", *_jpeg(data))
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            header = Header("WEBP", *_webp(data))
        else:
            raise ImageError(f"is {_other(data)}; {_TAKEN}")
    except (struct.error, IndexError):
        raise ImageError(f"has {len(data)} bytes and ends within its header") from None
    if not header.width or not header.height:
        raise ImageError(f"says that it has {header.width} x {header.height} pixels")
    return header


def _other(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "HEIF or AVIF, or a video" if data[8:12] != b"avif" else "AVIF"
    names = (name for name, begins in _OTHERS if data.startswith(begins))
    return next(names, "of no known format")


def _png(data: bytes) -> tuple[int, int]:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if (length, kind) != (13, b"IHDR"):
        raise ImageError("begins as a PNG, and has no header (IHDR)")
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    at = 2
    for _ in range(_MOST_SEGMENTS):
        if data[at] != 0xFF:
            raise ImageError(f"begins as a JPEG, and has no marker at byte {at}")
        # Any number of 0xFF may precede a marker, as far as they count as segments.
        kind = data[at + 1]
        if kind == 0xFF:
            at += 1
            continue
        if kind in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        if kind in _ENTROPY:
            raise ImageError("begins as a JPEG, and has no frame header (SOF)")
        at += 2
        if kind not in _BARE:
            (length,) = struct.unpack_from(">H", data, at)
            if length < 2:
                raise ImageError(f"has a segment of {length} bytes at byte {at}")
            at += length
    raise ImageError(f"has more than {_MOST_SEGMENTS} segments before its frame header")


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        flags, width, height = struct.unpack("<B3x3s3s", data[20:30])
        if flags & _ANIMATED:
            raise ImageError("is an animation; images of one frame are taken")
        return int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1
    if kind == b"VP8L":
        mark, bits = struct.unpack_from("<BI", data, 20)
        if mark != 0x2F:
            raise ImageError("begins as a WebP, and has no header (VP8L)")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        mark, width, height = struct.unpack_from("<3x3sHH", data, 20)
        if mark != b"\x9d\x01\x2a":
            raise ImageError("begins as a WebP, and has no header (VP8)")
        return width & 0x3FFF, height & 0x3FFF
    raise ImageError("begins as a WebP, and has no image")
