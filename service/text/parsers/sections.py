# ruff: noqa: RUF001 - the models' tokens have such characters
"""Calls as JSON in a section of special tokens: DeepSeek up to V3.1, and Kimi K2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from tokenpod.core.constraints import Tag, Tagged
from tokenpod.service.text.parsers.calls import CallFormat, Calls, ToolCallShape
from tokenpod.service.text.parsers.grammar import (
    MOST_NAME,
    WHITESPACE,
    Grammar,
    Source,
    Unexpected,
    json_value,
    literal,
    one_of,
    space,
    until,
)


class _Section(CallFormat):
    """All calls of a turn between two marks."""

    _begin: str
    _sep: str
    _end: str
    _after: str

    def matches(self, template: str) -> bool:
        """By the mark."""
        return self.marks[0] in template

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """All calls of the section."""
        while True:
            yield from space(source)
            found = yield from one_of(source, (self._begin, self._after))
            if found == self._after:
                return
            name = yield from until(source, self._sep, MOST_NAME)
            yield from space(source)
            yield from self._call(source, calls, name)
            yield from space(source)
            yield from literal(source, self._end)

    @abstractmethod
    def _call(self, source: Source, calls: Calls, name: str) -> Grammar:
        """The rest of a call, behind what stands for its name."""


class DeepSeek(_Section):
    """`<call begin>f<sep>{"x": 1}<call end>`; in V3 and R1 a kind, the name and a code block."""

    name = "deepseek"
    marks = ("<｜tool▁calls▁begin｜>",)
    _begin, _sep, _end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    _after = "<｜tool▁calls▁end｜>"
    shown = (_begin, _sep, _end, _after)

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """One section with all calls, in code blocks where the template has them."""
        in_block = "```json" in template
        tags = tuple(
            Tag(
                f"{self._begin}function{self._sep}{c.name}\n```json\n",
                c.arguments,
                f"\n```{self._end}",
            )
            if in_block
            else Tag(f"{self._begin}{c.name}{self._sep}", c.arguments, self._end)
            for c in calls
        )
        separator, (before,) = "\n" if in_block else "", self.marks
        triggers = () if must else self.marks
        return Tagged(tags, before, separator, self._after, triggers=triggers)

    def _call(self, source: Source, calls: Calls, name: str) -> Grammar:
        in_block = source.char != "{"
        if in_block:
            name = yield from until(source, "\n", MOST_NAME)
            yield from literal(source, "```json")
            yield from space(source)
        yield from _arguments(source, calls, name)
        if in_block:
            yield from space(source)
            yield from literal(source, "```")


class Kimi(_Section):
    """`<call begin>functions.f:0<arguments begin>{"x": 1}<call end>`."""

    name = "kimi"
    marks = ("<|tool_calls_section_begin|>",)
    _begin, _sep = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
    _end, _after = "<|tool_call_end|>", "<|tool_calls_section_end|>"
    shown = (_begin, _sep, _end, _after)

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """One section with all calls. Which call of the turn it is, the grammar can't count."""
        tags = tuple(
            Tag(f"{self._begin}functions.{c.name}:0{self._sep}", c.arguments, self._end)
            for c in calls
        )
        triggers = () if must else self.marks
        return Tagged(tags, before=self.marks[0], after=self._after, triggers=triggers)

    def _call(self, source: Source, calls: Calls, name: str) -> Grammar:
        # The model's own ids say no more than ours.
        name = name.strip(WHITESPACE).removeprefix("functions.")
        yield from _arguments(source, calls, name.rpartition(":")[0] or name)


def _arguments(source: Source, calls: Calls, name: str) -> Grammar:
    name = name.strip(WHITESPACE)
    if source.char != "{" or not name:
        raise Unexpected
    calls.begin(name)
    yield from json_value(source, calls.more)
    calls.end(late=True)
