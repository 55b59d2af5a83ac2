"""Requests that are not what they should be on the wire: the client's fault, and told as such.

grpcio answers UNKNOWN with a traceback in the log where a message cannot be decoded. Here decoding
never raises: what it found wrong travels to the handler in the message's place and is raised there,
where errors become statuses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from tokenpod.service.errors import InvalidArgument

#: What names a violation of the message as a whole.
WHOLE = "request"
#: Protobuf's wire types.
_VARINT, _DELIMITED = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}
_LONGEST_VARINT = 10


def tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A deserialiser that returns InvalidArgument where `deserialize` raises DecodeError."""
    kind = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return undecodable(kind, data)

    return parse


def decoded(request: Any) -> Any:
    """`request`; raises the InvalidArgument that decoding left in its place."""
    if isinstance(request, InvalidArgument):
        raise request
    return request


async def decoded_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The same for each message of a stream."""
    async for request in requests:
        yield decoded(request)


def undecodable(kind: Descriptor | None, data: bytes) -> InvalidArgument:
    """Why `data` is no message of `kind`, by the name of the first field at fault."""
    fault = _find(kind, data, "") if kind is not None else None
    return fault or InvalidArgument(WHOLE, "is not a valid protobuf message")


# -- the wire ----------------------------------------------------------------------------------


class _CutOff(Exception):
    """The bytes end, or make no sense, in the middle of a field."""


def _find(kind: Descriptor, data: bytes, path: str) -> InvalidArgument | None:
    """The first fault in `data`; None: each field by itself is fine."""
    seen: dict[int, int] = {}
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            field = kind.fields_by_number.get(tag >> 3)
            value, at = _value(data, at, tag & 7)
            if field is None or value is None:
                continue
            index = seen[field.number] = seen.get(field.number, -1) + 1
            name = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            if fault := _fault_of(field, value, name):
                return fault
    except _CutOff:
        return InvalidArgument(path.rstrip(".") or WHOLE, "is not a valid protobuf message")
    return None


def _fault_of(field: FieldDescriptor, value: bytes, name: str) -> InvalidArgument | None:
    """What is wrong with a length-delimited field."""
    if field.message_type is not None:
        return _find(field.message_type, value, f"{name}.")
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            value.decode()
        except UnicodeDecodeError as error:
            return InvalidArgument(
                name, f"is not valid UTF-8: {error.reason} at byte {error.start}"
            )
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins."""
    number = 0
    for i, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, at + i + 1
    raise _CutOff


def _value(data: bytes, at: int, wire_type: int) -> tuple[bytes | None, int]:
    """The bytes of a length-delimited field (None for others), and where the next one begins."""
    if wire_type == _VARINT:
        return None, _varint(data, at)[1]
    if wire_type == _DELIMITED:
        size, at = _varint(data, at)
    elif wire_type in _FIXED_SIZES:
        size = _FIXED_SIZES[wire_type]
    else:
        # Groups, which our messages never had, and what is not defined.
        raise _CutOff
    end = at + size
    if end > len(data):
        raise _CutOff
    return (data[at:end] if wire_type == _DELIMITED else None), end
