"""What a strict protocol refuses on the wire, where proto3 would say nothing.

A parser keeps fields that it does not know for later, takes any number for an enum's, and lets the
last of a oneof's fields win. An ignored constraint is a wrong answer, so a client that is newer
than its server, or was generated from something else, is told instead. The walk that counts a
message's fields (wire.py) shows each of them to a `Strict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenpod.service.calls.errors import InvalidArgument
from tokenpod.service.rpc.wire_types import DELIMITED, FIXED32, FIXED64, VARINT, varint

_F = FieldDescriptor
_WIRE_TYPES = {
    **dict.fromkeys((_F.TYPE_FLOAT, _F.TYPE_FIXED32, _F.TYPE_SFIXED32), FIXED32),
    **dict.fromkeys((_F.TYPE_DOUBLE, _F.TYPE_FIXED64, _F.TYPE_SFIXED64), FIXED64),
    **dict.fromkeys((_F.TYPE_STRING, _F.TYPE_BYTES, _F.TYPE_MESSAGE), DELIMITED),
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is known of a field; `oneof`: the name of the one it is in; `values`: an enum's."""

    name: str
    wire_types: frozenset[int]
    is_repeated: bool
    oneof: str | None
    values: frozenset[int] | None
    below: Rules | None


#: The fields of a message, by their numbers.
Rules = Mapping[int, _Rule]


def rules_of(kind: Descriptor, known: dict[str, Rules] | None = None) -> Rules:
    """What is known of the fields of `kind`, and of the messages in it.

    `known`: rules by the names of messages, of which some hold themselves.
    """
    known = {} if known is None else known
    if kind.full_name in known:
        return known[kind.full_name]
    rules: dict[int, _Rule] = {}
    known[kind.full_name] = rules
    for each in kind.fields:
        below = rules_of(each.message_type, known) if each.message_type is not None else None
        rules[each.number] = _rule(each, below)
    return rules


def _rule(field: FieldDescriptor, below: Rules | None) -> _Rule:
    wire_types = {_WIRE_TYPES.get(field.type, VARINT)}
    if field.is_repeated:
        assert field.enum_type is None, f"{field.full_name}: lists of enums are not looked into"
        # Numbers of a list come one by one or packed.
        wire_types.add(DELIMITED)
    oneof = field.containing_oneof
    if oneof is not None and len(oneof.fields) == 1:
        # A field that may be absent is in a oneof of its own, under the hood.
        oneof = None
    values = frozenset(field.enum_type.values_by_number) if field.enum_type is not None else None
    return _Rule(
        name=field.name,
        wire_types=frozenset(wire_types),
        is_repeated=field.is_repeated,
        oneof=oneof.name if oneof is not None else None,
        values=values,
        below=below,
    )


@dataclass(slots=True)
class _Level:
    """A message that is being walked over."""

    rules: Rules
    #: Of the message, with a dot at its end; "": the request itself.
    path: str
    #: The field that each oneof has.
    chosen: dict[str, str] = field(default_factory=dict)
    #: Entries of lists of messages so far.
    entries: dict[int, int] = field(default_factory=dict)


class Lenient:
    """Takes every field; where the walk over a message has come, is told to it."""

    def field(self, number: int, wire_type: int, data: bytes, at: int) -> None:
        """The walk has come to a field, whose value begins `at`. Raises InvalidArgument."""

    def enter(self, number: int) -> None:
        """The walk goes into the message in field `number`."""

    def leave(self) -> None:
        """The walk comes back from it."""


LENIENT = Lenient()


class Strict(Lenient):
    """Refuses what the rules don't know, in one walk over a message."""

    def __init__(self, rules: Rules) -> None:
        self._level = _Level(rules, "")
        self._above: list[_Level] = []

    def field(self, number: int, wire_type: int, data: bytes, at: int) -> None:
        """Refuse the field if it is not one of the message's, or is not what it should be."""
        level = self._level
        rule = level.rules.get(number)
        if rule is None:
            problem = f"is not known to this server: the message has no field {number}"
            raise InvalidArgument(f"{level.path}{number}", problem)
        if wire_type not in rule.wire_types:
            raise InvalidArgument(f"{level.path}{rule.name}", _wrong_type(number, wire_type, rule))
        if rule.oneof is not None:
            before = level.chosen.setdefault(rule.oneof, "")
            if before:
                problem = f"is set twice: {before} and {rule.name}"
                raise InvalidArgument(f"{level.path}{rule.oneof}", problem)
            level.chosen[rule.oneof] = rule.name
        if rule.values is not None:
            self._check_value(rule, varint(data, at)[0])

    def enter(self, number: int) -> None:
        """Look at the message in field `number`."""
        level = self._level
        rule = level.rules[number]
        assert rule.below is not None
        path = f"{level.path}{rule.name}"
        if rule.is_repeated:
            index = level.entries[number] = level.entries.get(number, -1) + 1
            path = f"{path}[{index}]"
        self._above.append(level)
        self._level = _Level(rule.below, f"{path}.")

    def leave(self) -> None:
        """Look at the message around it."""
        self._level = self._above.pop()

    def _check_value(self, rule: _Rule, value: int) -> None:
        number = value - (1 << 64) if value >> 63 else value
        assert rule.values is not None
        if number not in rule.values:
            problem = f"is {number}, which is no value that this server knows"
            raise InvalidArgument(f"{self._level.path}{rule.name}", problem)


def _wrong_type(number: int, wire_type: int, rule: _Rule) -> str:
    expected = " or ".join(map(str, sorted(rule.wire_types)))
    return f"(field {number}) has wire type {wire_type} instead of {expected}: it is another type"
