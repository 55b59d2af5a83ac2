"""Protobuf's wire: types of fields, and numbers of varying length."""

from __future__ import annotations

VARINT, FIXED64, DELIMITED, GROUP_BEGIN, GROUP_END, FIXED32 = range(6)
LONGEST_VARINT = 10


class Malformed(Exception):
    """The bytes end, or make no sense, in the middle of a field."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    number = shift = 0
    for place in range(at, at + LONGEST_VARINT):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place + 1
        shift += 7
    raise Malformed
