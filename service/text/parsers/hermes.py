"""Hermes and Qwen: a JSON object between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

from tokenpod.service.text.parsers.calls import CallFormat, Calls, json_call
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

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """One call, whose end some models leave out."""
        yield from space(source)
        yield from json_call(source, calls, known=False)
        yield from space(source)
        if source.char == _END[0]:
            yield from literal(source, _END)
