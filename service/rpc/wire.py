"""What a message costs, read off its bytes before anything is made of them.

Parsing is fast for a byte and slow for an element: 4 MB of empty strings are two million objects.
`count` walks over the fields of a message, known or not, in steps that a caller can take apart, and
gives up at a limit. What passes can be parsed without holding up the event loop. `fault_in` says
which field is to blame where parsing has failed; it walks no further than `count` has.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.rpc.wire_rules import LENIENT, Lenient
from tokenpod.service.rpc.wire_types import (
    DELIMITED,
    FIXED32,
    FIXED64,
    GROUP_BEGIN,
    GROUP_END,
    LONGEST_VARINT,
    VARINT,
    Malformed,
    varint,
)

#: What names a violation of the message as a whole.
WHOLE = "request"
#: Fields that are walked over at a time: a few milliseconds.
SLICE = 2048
#: The same where names are kept.
SEARCH_SLICE = 512

#: What it takes to make an object of a message, in fields.
MESSAGE_FIELDS = 8
#: Messages within messages, at most: a little less than what protobuf's own parser takes.
DEEPEST = 90

#: The bytes that do not end a varint.
_UNENDING = bytes(range(0x80, 0x100))
_FLOATS = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4}
_FLOATS |= {FieldDescriptor.TYPE_SFIXED32: 4, FieldDescriptor.TYPE_DOUBLE: 8}
_FLOATS |= {FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8}


@dataclass(frozen=True, slots=True)
class Size:
    """What a message may hold.

    Args:
        fields: tags on the wire, those of nested messages included. A list of strings has one for
            each entry. A nested message counts as `MESSAGE_FIELDS`, even if it is empty.
        elements: numbers in packed lists.
    """

    fields: int
    elements: int


@dataclass(frozen=True, slots=True)
class _Packed:
    """A packed list of numbers; `width`: bytes of each, 0 for varints."""

    width: int


#: What lies in a message's length-delimited fields, by number; other fields are not there.
Shape = Mapping[int, Any]


def shape_of(kind: Descriptor, known: dict[str, Shape] | None = None) -> Shape:
    """What of `kind` must be looked into: messages and packed lists.

    `known`: shapes by the names of messages, of which some hold themselves.
    """
    known = {} if known is None else known
    if kind.full_name in known:
        return known[kind.full_name]
    shape: dict[int, Any] = {}
    known[kind.full_name] = shape
    for field in kind.fields:
        if field.message_type is not None:
            shape[field.number] = shape_of(field.message_type, known)
        elif field.is_repeated and field.type not in _TEXTS:
            shape[field.number] = _Packed(_FLOATS.get(field.type, 0))
    return shape


_TEXTS = frozenset({FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES})


def count(
    kind: Descriptor, shape: Shape, data: bytes, most: Size, strict: Lenient = LENIENT
) -> Iterator[None]:
    """Walk over `data`, yielding after each `SLICE` fields.

    Raises InvalidArgument, with the name of the list that is to blame where it is one, once there
    are more fields or elements than `most`, messages are nested too deeply, or `strict` (fresh)
    finds a field that it refuses; Malformed once the bytes are no message.
    """
    fields, weight, elements = 0, 0, most.elements
    above: list[tuple[Shape, int]] = []
    numbers: list[int] = []
    at, end = 0, len(data)
    try:
        while True:
            while at >= end:
                if not above:
                    return
                shape, end = above.pop()
                numbers.pop()
                strict.leave()
            fields += 1
            if not fields % SLICE:
                yield
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = varint(data, at - 1)
            number, wire_type = tag >> 3, tag & 7
            if fields + weight > most.fields:
                raise _too_long(kind, [*numbers, number], f"{most.fields} fields")
            strict.field(number, wire_type, data, at)
            if wire_type == DELIMITED:
                size, at = varint(data, at)
                stop = at + size
                if stop > end:
                    raise Malformed
                inner = shape.get(number)
                if type(inner) is dict:
                    weight += MESSAGE_FIELDS - 1
                    if len(above) == DEEPEST:
                        raise InvalidArgument(WHOLE, f"nests messages more than {DEEPEST} deep")
                    above.append((shape, end))
                    numbers.append(number)
                    strict.enter(number)
                    shape, end = inner, stop
                    continue
                if inner is not None:
                    elements -= _elements(inner, data, at, stop, elements)
                    if elements < 0:
                        path = [*numbers, number]
                        raise _too_long(kind, path, f"{most.elements} numbers in lists")
                at = stop
            else:
                at = _skipped(data, at, wire_type)
            if at > end:
                raise Malformed
    except IndexError:
        raise Malformed from None


def fault_in(kind: Descriptor, data: bytes) -> Generator[None, None, InvalidArgument]:
    """Why `data` is no message of `kind`, by the name of the first field at fault.

    It yields after each `SEARCH_SLICE` fields and returns what it has found.
    """
    found = yield from _find(kind, data, (0, len(data)), "", itertools.count(1))
    return found or InvalidArgument(WHOLE, "is not a valid protobuf message")


# -- parts of a walk ---------------------------------------------------------------------------


def _skipped(data: bytes, at: int, wire_type: int) -> int:
    """Where the next thing begins after a value that is not length-delimited."""
    if wire_type == VARINT:
        return at + 1 if data[at] < 0x80 else varint(data, at)[1]
    if wire_type == FIXED32:
        return at + 4
    if wire_type == FIXED64:
        return at + 8
    if wire_type in (GROUP_BEGIN, GROUP_END):
        # Our messages never had groups. What is in one counts like everything else.
        return at
    raise Malformed


def _elements(packed: _Packed, data: bytes, at: int, stop: int, most: int) -> int:
    """Elements of a packed list; more than `most` need not be counted to the last."""
    size = stop - at
    if packed.width:
        return size // packed.width
    if size > LONGEST_VARINT * most:
        return most + 1
    return len(data[at:stop].translate(None, _UNENDING)) if size > most else size


def _too_long(kind: Descriptor, numbers: list[int], limit: str) -> InvalidArgument:
    """For a message that has reached its limit at the field to which `numbers` lead."""
    problem = f"is too long: a message of this method has at most {limit}"
    return InvalidArgument(_list_name(kind, numbers), problem)


def _list_name(kind: Descriptor, numbers: list[int]) -> str:
    """The path to the outermost list on the way to a field; `WHOLE`: there is none."""
    names = []
    for number in numbers:
        field = kind.fields_by_number.get(number)
        if field is None:
            return WHOLE
        names.append(field.name)
        if field.is_repeated:
            return ".".join(names)
        if field.message_type is None:
            return WHOLE
        kind = field.message_type
    return WHOLE


def _find(
    kind: Descriptor, data: bytes, part: tuple[int, int], path: str, fields: Iterator[int]
) -> Generator[None, None, InvalidArgument | None]:
    """The first fault in a part of `data`; None: each field by itself is fine."""
    seen: dict[int, int] = {}
    at, end = part
    try:
        while at < end:
            if not next(fields) % SEARCH_SLICE:
                yield
            tag, at = varint(data, at)
            if tag & 7 != DELIMITED:
                at = _skipped(data, at, tag & 7)
                continue
            size, at = varint(data, at)
            start, at = at, at + size
            if at > end:
                raise Malformed
            field = kind.fields_by_number.get(tag >> 3)
            if field is None:
                continue
            index = seen[field.number] = seen.get(field.number, -1) + 1
            name = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            if field.message_type is not None:
                fault = yield from _find(field.message_type, data, (start, at), f"{name}.", fields)
            else:
                fault = _fault_of(field, memoryview(data)[start:at], name)
            if fault is not None:
                return fault
        if at > end:
            raise Malformed
    except (Malformed, IndexError):
        return InvalidArgument(path.rstrip(".") or WHOLE, "is not a valid protobuf message")
    return None


def _fault_of(field: FieldDescriptor, value: memoryview, name: str) -> InvalidArgument | None:
    """What is wrong with a text."""
    if field.type != FieldDescriptor.TYPE_STRING:
        return None
    try:
        str(value, "utf-8")
    except UnicodeDecodeError as error:
        problem = f"is not valid UTF-8: {error.reason} at byte {error.start}"
        return InvalidArgument(name, problem)
    return None
