"""Calls as JSON objects: Hermes and Qwen between tags, Llama 3 as a turn, Mistral as a list.

Mistral, since 2025, writes a name and an object for each call.
"""

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
    Grammar,
    Source,
    Unexpected,
    json_value,
    literal,
    space,
    word,
)

_END = "</tool_call>"


class Hermes(CallFormat):
    """`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, once for each call."""

    name = "hermes"
    marks = ("<tool_call>",)
    shown = (_END,)

    def matches(self, template: str) -> bool:
        """Not where the same tags hold XML, as in Qwen3-Coder and GLM."""
        return "<tool_call>" in template and not (
            "<function=" in template or "<arg_key>" in template
        )

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """One pair of marks for each call."""
        tags = tuple(
            Tag(f"{self.marks[0]}\n{tag.begin}", tag.inside, f"{tag.end}\n{_END}")
            for tag in json_tags(calls)
        )
        return Tagged(tags, separator="\n", triggers=() if must else self.marks)

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """One call, whose end some models leave out."""
        yield from space(source)
        yield from json_call(source, calls, known=False)
        yield from space(source)
        if source.char == _END[0]:
            yield from literal(source, _END)


class Llama3Json(CallFormat):
    """`{"name": "f", "parameters": {"x": 1}}`, with `<|python_tag|>` before it or not."""

    name = "llama3_json"
    marks = ("<|python_tag|>",)
    openings = "{"

    def matches(self, template: str) -> bool:
        """By the tokens around headers, and what it tells the model of calls."""
        return "<|start_header_id|>" in template and '"parameters": ' in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """Objects with `;` between them; within text only behind the mark."""
        tags = json_tags(calls, "parameters")
        if must:
            return Tagged(tags, separator="; ")
        return Tagged(tags, before=self.marks[0], separator="; ", triggers=self.marks)

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """All calls. Without the mark, JSON that calls none of the request's tools is text."""
        yield from space(source)
        while True:
            yield from json_call(source, calls, known=not marked)
            yield from space(source)
            if source.char != ";":
                return
            yield
            yield from space(source)


_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_NAME_MARKS = "_-.:"


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
    name = yield from word(source, _NAME_MARKS)
    if source.char == "[":
        yield
        if source.char == _ID[1]:
            yield from literal(source, _ID[1:])
            # The model's own id says no more than ours.
            yield from word(source, _NAME_MARKS)
            yield from literal(source, _ARGUMENTS)
        else:
            yield from literal(source, _ARGUMENTS[1:])
    yield from space(source)
    if source.char != "{":
        raise Unexpected
    calls.begin(name)
    yield from json_value(source, calls.more)
    calls.end()
