"""Hermes and Qwen: a JSON object between `<tool_call>` and `</tool_call>`."""

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
from tokenpod.service.text.parsers.grammar import Grammar, Source, literal, space

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
