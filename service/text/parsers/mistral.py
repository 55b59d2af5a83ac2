"""Mistral: `[TOOL_CALLS]`, then a JSON list or, since 2025, a name and an object for each."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.core.constraints import Tag, Tagged
from tokenpod.service.text.parsers.calls import (
    CallFormat,
    Calls,
    ToolCallShape,
    json_call,
    json_tags,
)
from tokenpod.service.text.parsers.grammar import (
    MOST_NAME,
    Grammar,
    Reading,
    Source,
    Unexpected,
    json_value,
    literal,
    space,
)

_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"


class Mistral(CallFormat):
    """`[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]` or `[TOOL_CALLS]f[ARGS]{"x": 1}`."""

    name = "mistral"
    marks = ("[TOOL_CALLS]",)
    shown = (_ID, _ARGUMENTS)

    def matches(self, template: str) -> bool:
        """By the mark."""
        return "[TOOL_CALLS]" in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """A list, or names and objects where the template has their mark."""
        (mark,), triggers = self.marks, () if must else self.marks
        if _ARGUMENTS in template:
            tags = tuple(Tag(f"{mark}{c.name}{_ARGUMENTS}", c.arguments, "") for c in calls)
            return Tagged(tags, triggers=triggers)
        tags = json_tags(calls)
        return Tagged(tags, before=f"{mark}[", separator=", ", after="]", triggers=triggers)

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
        if len(taken) == MOST_NAME:
            raise Unexpected
        taken.append(source.char)
        yield
    if not taken:
        raise Unexpected
    return "".join(taken)
