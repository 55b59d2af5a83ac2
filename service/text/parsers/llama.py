"""Llama 3: a turn that is a JSON object, or several with `;` between them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenpod.core.constraints import Tagged
from tokenpod.service.text.parsers.calls import (
    CallFormat,
    Calls,
    ToolCallShape,
    json_call,
    json_tags,
)
from tokenpod.service.text.parsers.grammar import Grammar, Source, space


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
