"""Mistral: `[TOOL_CALLS]`, then a JSON list or, since 2025, a name and an object for each."""

from __future__ import annotations

from tokenpod.service.text.parsers.calls import CallFormat, Calls, json_call
from tokenpod.service.text.parsers.grammar import (
    Grammar,
    Reading,
    Source,
    Unexpected,
    json_value,
    literal,
    space,
)

_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_MOST_NAME = 256


class Mistral(CallFormat):
    """`[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]` or `[TOOL_CALLS]f[ARGS]{"x": 1}`."""

    name = "mistral"
    marks = ("[TOOL_CALLS]",)
    shown = (_ID, _ARGUMENTS)

    def matches(self, template: str) -> bool:
        """By the mark."""
        return "[TOOL_CALLS]" in template

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """All calls of a list, or the one that has its name before it."""
        yield from space(source)
        if source.char == "[":
            yield from _listed(source, calls)
        else:
            yield from _named(source, calls)


def _listed(source: Source, calls: Calls) -> Grammar:
    yield
    while True:
        yield from space(source)
        yield from json_call(source, calls, known=False)
        yield from space(source)
        if source.char != ",":
            break
        yield
    yield from literal(source, "]")


def _named(source: Source, calls: Calls) -> Grammar:
    name = yield from _name(source)
    if source.char == "[":
        yield
        if source.char == _ID[1]:
            yield from literal(source, _ID[1:])
            # The model's own id says no more than ours.
            yield from _name(source)
            yield from literal(source, _ARGUMENTS)
        else:
            yield from literal(source, _ARGUMENTS[1:])
    yield from space(source)
    if source.char != "{":
        raise Unexpected
    calls.begin(name)
    yield from json_value(source, calls.more)
    calls.end()


def _name(source: Source) -> Reading:
    taken: list[str] = []
    while source.char and (source.char.isalnum() or source.char in "_-.:"):
        if len(taken) == _MOST_NAME:
            raise Unexpected
        taken.append(source.char)
        yield
    if not taken:
        raise Unexpected
    return "".join(taken)
