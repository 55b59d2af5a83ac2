"""What a message costs and what is wrong with it, read off its bytes before anything is made of it.

Parsing is fast for a byte and slow for an element: 4 MB of empty strings are two million objects,
a quarter of a second. `count` walks over the fields of a message, known or not, in steps that a
caller can take apart, and gives up at a limit. What passes can be parsed without holding up the
event loop. `fault_in` says which field is to blame where parsing has failed; it walks no further
than `count` has.

The same walk shows each field to a `Strict`, where proto3 would say nothing: a parser keeps fields
that it does not know for later, takes any number for an enum's, and lets the last of a oneof's
fields win. An ignored constraint is a wrong answer, so a client that is newer than its server, or
was generated from something else, gets an error instead. Protobuf's own list of unknown fields is
no help here: it is there only behind a parse, takes seconds for a million of them, and knows no
oneofs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenpod.service.calls.errors import InvalidArgument

VARINT, FIXED64, DELIMITED, GROUP_BEGIN, GROUP_END, FIXED32 = range(6)
LONGEST_VARINT = 10

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


# -- what is known of a message ----------------------------------------------------------------

_F = FieldDescriptor
#: Wire types, and bytes of a number in a packed list, by the types of fields; others are varints.
_WIRE_TYPES = {
    **dict.fromkeys((_F.TYPE_FLOAT, _F.TYPE_FIXED32, _F.TYPE_SFIXED32), FIXED32),
    **dict.fromkeys((_F.TYPE_DOUBLE, _F.TYPE_FIXED64, _F.TYPE_SFIXED64), FIXED64),
    **dict.fromkeys((_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_MESSAGE), DELIMITED),
}
_WIDTHS = {VARINT: 0, FIXED32: 4, FIXED64: 8}


@dataclass(frozen=True, slots=True)
class _Field:
    """What is known of a field.

    `oneof`: the name of the one it is in; `values`: an enum's; `below`: the fields of the message
    in it; `width`: of a list of numbers, bytes of each where they are packed, 0 for varints.
    """

    name: str
    wire_types: frozenset[int]
    is_repeated: bool
    is_text: bool
    oneof: str | None
    values: frozenset[int] | None
    below: Fields | None
    width: int | None


#: The fields of a message, by their numbers.
Fields = Mapping[int, _Field]


def fields_of(kind: Descriptor, known: dict[str, Fields] | None = None) -> Fields:
    """What is known of the fields of `kind`, and of the messages in it.

    `known`: the same by the names of messages, of which some hold themselves.
    """
    known = {} if known is None else known
    if kind.full_name not in known:
        fields: dict[int, _Field] = {}
        known[kind.full_name] = fields
        for each in kind.fields:
            below = None if each.message_type is None else fields_of(each.message_type, known)
            fields[each.number] = _field(each, below)
    return known[kind.full_name]


def _field(field: FieldDescriptor, below: Fields | None) -> _Field:
    wire_type = _WIRE_TYPES.get(field.type, VARINT)
    oneof = field.containing_oneof
    if oneof is not None and len(oneof.fields) == 1:
        # A field that may be absent is in a oneof of its own, under the hood.
        oneof = None
    values = None
    # Lists of enums are not looked into: no strict protocol has any.
    if field.enum_type is not None and not field.is_repeated:
        values = frozenset(field.enum_type.values_by_number)
    return _Field(
        name=field.name,
        # Numbers of a list come one by one or packed.
        wire_types=frozenset({wire_type, DELIMITED} if field.is_repeated else {wire_type}),
        is_repeated=field.is_repeated,
        is_text=field.type == _F.TYPE_STRING,
        oneof=None if oneof is None else oneof.name,
        values=values,
        below=below,
        width=_WIDTHS.get(wire_type) if field.is_repeated else None,
    )


# -- what a strict protocol refuses -----------------------------------------------------------


@dataclass(slots=True)
class _Level:
    """A message that is being walked over."""

    #: Of the message, with a dot at its end; "": the request itself.
    path: str = ""
    #: The field that each oneof has.
    chosen: dict[str, str] = field(default_factory=dict)
    #: Entries of lists of messages so far.
    entries: dict[int, int] = field(default_factory=dict)


class Lenient:
    """Accepts every field that the walk over a message comes to."""

    def field(
        self, field: _Field | None, number: int, wire_type: int, data: bytes, at: int
    ) -> None:
        """The walk has come to a field, whose value begins `at`. Raises InvalidArgument."""

    def enter(self, field: _Field, number: int) -> None:
        """The walk goes into the message in a field."""

    def leave(self) -> None:
        """The walk comes back from it."""


LENIENT = Lenient()


class Strict(Lenient):
    """Refuses what is not known, in one walk over a message."""

    def __init__(self) -> None:
        self._level = _Level()
        self._above: list[_Level] = []

    def field(
        self, field: _Field | None, number: int, wire_type: int, data: bytes, at: int
    ) -> None:
        """Refuse the field if it is not one of the message's, or is not what it should be."""
        level = self._level
        if field is None:
            problem = f"is not known to this server: the message has no field {number}"
            raise InvalidArgument(f"{level.path}{number}", problem)
        if wire_type not in field.wire_types:
            raise InvalidArgument(
                f"{level.path}{field.name}", _wrong_type(number, wire_type, field)
            )
        if field.oneof is not None:
            before = level.chosen.setdefault(field.oneof, "")
            if before:
                problem = f"is set twice: {before} and {field.name}"
                raise InvalidArgument(f"{level.path}{field.oneof}", problem)
            level.chosen[field.oneof] = field.name
        if field.values is not None:
            value = varint(data, at)[0]
            value -= (value >> 63) << 64
            if value not in field.values:
                problem = f"is {value}, which is no value that this server knows"
                raise InvalidArgument(f"{level.path}{field.name}", problem)

    def enter(self, field: _Field, number: int) -> None:
        """Look at the message in a field."""
        level = self._level
        path = f"{level.path}{field.name}"
        if field.is_repeated:
            index = level.entries[number] = level.entries.get(number, -1) + 1
            path = f"{path}[{index}]"
        self._above.append(level)
        self._level = _Level(f"{path}.")

    def leave(self) -> None:
        """Look at the message around it."""
        self._level = self._above.pop()


def _wrong_type(number: int, wire_type: int, field: _Field) -> str:
    expected = " or ".join(map(str, sorted(field.wire_types)))
    return f"(field {number}) has wire type {wire_type} instead of {expected}: it is another type"


# -- what a message costs ----------------------------------------------------------------------

#: The bytes that do not end a varint.
_UNENDING = bytes(range(0x80, 0x100))


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


#: For messages up to this size the limits on fields and elements hold as they are; larger ones,
#: which come from routers' sockets alone, may hold more in proportion.
PLAIN_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MethodLimits:
    """What one message of a method may be.

    The numbers are about what is believable, not about what is allowed: calls/limits.py says
    that, by names and values. Whatever passes here is parsed and checked in a few milliseconds.

    Args:
        bytes: at most; None: what the listener takes.
        size: what it may hold.
        trusted: what it may hold on a listener that only routers reach; None: the same.
        lists: the operator's limits on biases and stop sequences come on top of `size`.
        strict: a field that the method's messages don't have is refused; see `Strict`.
    """

    bytes: int | None
    size: Size
    trusted: Size | None = None
    lists: bool = False
    strict: bool = False

    def size_for(self, length: int) -> Size:
        """What a message of `length` bytes may hold; raises InvalidArgument if it is too long."""
        if self.bytes is not None and length > self.bytes:
            problem = f"has {length} bytes; this method takes at most {self.bytes}"
            raise InvalidArgument(WHOLE, problem)
        if length <= PLAIN_BYTES:
            return self.size
        scale = length / PLAIN_BYTES
        return Size(math.ceil(self.size.fields * scale), math.ceil(self.size.elements * scale))


def count(known: Fields, data: bytes, most: Size, strict: Lenient = LENIENT) -> Iterator[None]:
    """Walk over `data`, yielding after each `SLICE` fields.

    Raises InvalidArgument, with the name of the list that is to blame where it is one, once there
    are more fields or elements than `most`, messages are nested too deeply, or `strict` (fresh)
    finds a field that it refuses; Malformed once the bytes are no message.
    """
    fields, weight, elements = 0, 0, most.elements
    above: list[tuple[Fields, int]] = []
    path: list[_Field | None] = []
    at, end = 0, len(data)
    try:
        while True:
            while at >= end:
                if not above:
                    return
                known, end = above.pop()
                path.pop()
                strict.leave()
            fields += 1
            if not fields % SLICE:
                yield
            tag = data[at]
            at += 1
            if tag > 0x7F:
                tag, at = varint(data, at - 1)
            number, wire_type = tag >> 3, tag & 7
            field = known.get(number)
            if fields + weight > most.fields:
                raise _too_long([*path, field], f"{most.fields} fields")
            strict.field(field, number, wire_type, data, at)
            if wire_type == DELIMITED:
                size, at = varint(data, at)
                stop = at + size
                if stop > end:
                    raise Malformed
                if field is None:
                    pass
                elif field.below is not None:
                    weight += MESSAGE_FIELDS - 1
                    if len(above) == DEEPEST:
                        raise InvalidArgument(WHOLE, f"nests messages more than {DEEPEST} deep")
                    above.append((known, end))
                    path.append(field)
                    strict.enter(field, number)
                    known, end = field.below, stop
                    continue
                elif field.width is not None:
                    elements -= _elements(field.width, data, at, stop, elements)
                    if elements < 0:
                        raise _too_long([*path, field], f"{most.elements} numbers in lists")
                at = stop
            else:
                at = _skipped(data, at, wire_type)
            if at > end:
                raise Malformed
    except IndexError:
        raise Malformed from None


def fault_in(known: Fields, data: bytes) -> Generator[None, None, InvalidArgument]:
    """Why `data` is no message with these fields, by the name of the first one at fault.

    It yields after each `SEARCH_SLICE` fields and returns what it has found.
    """
    found = yield from _find(known, data, (0, len(data)), "", itertools.count(1))
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


def _elements(width: int, data: bytes, at: int, stop: int, most: int) -> int:
    """Elements of a packed list; more than `most` need not be counted to the last."""
    size = stop - at
    if width:
        return size // width
    if size > LONGEST_VARINT * most:
        return most + 1
    return len(data[at:stop].translate(None, _UNENDING)) if size > most else size


def _too_long(path: Sequence[_Field | None], limit: str) -> InvalidArgument:
    """For a message that has reached its limit at the last field of `path`.

    It names the outermost list on the way there; `WHOLE` where there is none.
    """
    name = WHOLE
    if lists := [at for at, field in enumerate(path) if field is not None and field.is_repeated]:
        name = ".".join(field.name for field in path[: lists[0] + 1] if field is not None)
    return InvalidArgument(name, f"is too long: a message of this method has at most {limit}")


def _find(
    known: Fields, data: bytes, part: tuple[int, int], path: str, fields: Iterator[int]
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
            number = tag >> 3
            field = known.get(number)
            if field is None:
                continue
            index = seen[number] = seen.get(number, -1) + 1
            name = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            if field.below is not None:
                fault = yield from _find(field.below, data, (start, at), f"{name}.", fields)
                if fault is not None:
                    return fault
            elif field.is_text:
                try:
                    str(memoryview(data)[start:at], "utf-8")
                except UnicodeDecodeError as error:
                    problem = f"is not valid UTF-8: {error.reason} at byte {error.start}"
                    return InvalidArgument(name, problem)
        if at > end:
            raise Malformed
    except (Malformed, IndexError):
        return InvalidArgument(path.rstrip(".") or WHOLE, "is not a valid protobuf message")
    return None
