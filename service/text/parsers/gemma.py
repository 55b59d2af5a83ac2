"""Gemma 4: `<|tool_call>call:f{x:<|"|>a<|"|>,y:1}<tool_call|>`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tokenpod.core.constraints import Tag, Tagged
from tokenpod.service.text.parsers.calls import CallFormat, Calls, ToolCallShape
from tokenpod.service.text.parsers.grammar import (
    MOST_NAME,
    WHITESPACE,
    Grammar,
    Reading,
    Source,
    Unexpected,
    entries,
    literal,
    quoted,
    space,
    until,
)
from tokenpod.service.text.parsers.values import arguments_between, json_of

_QUOTE = '<|"|>'
#: Lists and objects within each other.
_DEEPEST = 64


class Gemma4(CallFormat):
    """Objects with bare keys, and texts between tokens of their own."""

    name = "gemma4"
    marks = ("<|tool_call>",)
    _end = "<tool_call|>"
    shown = (_QUOTE, _end)

    def matches(self, template: str) -> bool:
        """By the mark."""
        return self.marks[0] in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """One pair of marks for each call. Lists and objects are JSON, which is read as well."""
        tags = []
        for call in calls:
            texts, others = (f"{{}}:{_QUOTE}", _QUOTE), ("{}:", "")
            arguments = arguments_between(call.schema, texts, others, ",")
            tags.append(Tag(f"{self.marks[0]}call:{call.name}{{", arguments, f"}}{self._end}"))
        return Tagged(tuple(tags), triggers=() if must else self.marks)

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """One call, reported once it is complete."""
        yield from space(source)
        yield from literal(source, "call:")
        name: list[str] = []
        while source.char and source.char not in f"{{{WHITESPACE}<":
            if len(name) > MOST_NAME:
                raise Unexpected
            name.append(source.char)
            yield
        yield from space(source)
        if source.char != "{" or not name:
            raise Unexpected
        arguments = yield from _object(source, 0)
        calls.begin("".join(name))
        calls.more(arguments)
        calls.end()
        yield
        yield from space(source)
        if source.char == self._end[0]:
            yield from literal(source, self._end)


def _object(source: Source, depth: int) -> Reading:
    """As JSON; it ends at the brace, not behind it."""

    def entry() -> Reading:
        key = yield from _key(source)
        yield from space(source)
        value = yield from _value(source, depth + 1)
        return f"{json.dumps(key, ensure_ascii=False)}: {value}"

    yield
    found = yield from entries(source, "}", entry)
    return f"{{{', '.join(found)}}}"


def _list(source: Source, depth: int) -> Reading:
    """As JSON; it ends at the bracket, not behind it."""
    yield
    found = yield from entries(source, "]", lambda: _value(source, depth + 1))
    return f"[{', '.join(found)}]"


def _key(source: Source) -> Reading:
    key = yield from until(source, ":", MOST_NAME)
    return key.strip(WHITESPACE).removeprefix(_QUOTE).removesuffix(_QUOTE).strip('"')


def _value(source: Source, depth: int) -> Reading:
    """A value as JSON, and what it ends with is read."""
    if depth > _DEEPEST:
        raise Unexpected
    if source.char == _QUOTE[0]:
        yield from literal(source, _QUOTE)
        text = yield from until(source, _QUOTE)
        return json.dumps(text, ensure_ascii=False)
    if source.char == '"':
        taken: list[str] = []
        yield from quoted(source, taken.append)
        return json_of("".join(taken), frozenset())
    if source.char in ("{", "["):
        read = _object if source.char == "{" else _list
        found = yield from read(source, depth)
        yield
        return found
    bare: list[str] = []
    while source.char and source.char not in ",]}" and source.char not in WHITESPACE:
        bare.append(source.char)
        yield
    if not bare:
        raise Unexpected
    return json_of("".join(bare), None)
