"""Llama 3: a turn that is a JSON object, or several with `;` between them."""

from __future__ import annotations

from tokenpod.service.text.parsers.calls import CallFormat, Calls, json_call
from tokenpod.service.text.parsers.grammar import Grammar, Source, space


class Llama3Json(CallFormat):
    """`{"name": "f", "parameters": {"x": 1}}`, with `<|python_tag|>` before it or not."""

    name = "llama3_json"
    marks = ("<|python_tag|>",)
    openings = "{"

    def matches(self, template: str) -> bool:
        """By the tokens around headers, and what it tells the model of calls."""
        return "<|start_header_id|>" in template and '"parameters": ' in template

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
