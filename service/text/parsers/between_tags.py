# ruff: noqa: RUF001 - the models' tokens have such characters
"""Calls whose arguments stand between tags: Qwen3-Coder, GLM, MiniMax, DeepSeek since V3.2.

<tool_call>                                 <tool_call>f
<function=f>                                <arg_key>x</arg_key>
<parameter=x>                               <arg_value>1</arg_value>
1                                           </tool_call>
</parameter>
</function>                                 <minimax:tool_call>
</tool_call>                                <invoke name="f">
                                            <parameter name="x">1</parameter>
                                            </invoke>
                                            </minimax:tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenpod.core.constraints import Tag, Tagged
from tokenpod.service.text.parsers.calls import CallFormat, Calls, ToolCallShape
from tokenpod.service.text.parsers.grammar import (
    MOST_NAME,
    WHITESPACE,
    Grammar,
    Reading,
    Source,
    Unexpected,
    literal,
    one_of,
    space,
    until,
)
from tokenpod.service.text.parsers.values import Kinds, arguments_between, json_of, kinds_of

#: Attributes of DeepSeek's parameters.
_IS_TEXT, _IS_JSON = 'string="true"', 'string="false"'
_TEXT: Kinds = frozenset({"string"})
_NO_TEXT: Kinds = frozenset()
#: No tool has these in its name: what stands there is another family's call.
_NO_NAME = frozenset("{}[]()<>")


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family writes a call. An empty text is not there.

    Args:
        marks: each begins calls.
        call, named: what stands before a call's name and behind it.
        parameter, valued: the same of an argument's name.
        value, value_end: before its value, behind whitespace, and after it.
        call_end: behind the last argument; empty: one of `ends` is.
        ends: behind the last call.
        lines: values stand on lines of their own.
        attributes: behind the name of an argument that is a text, and of another one.
    """

    marks: tuple[str, ...]
    call: str
    named: str
    parameter: str
    valued: str
    value_end: str
    ends: tuple[str, ...]
    call_end: str = ""
    value: str = ""
    lines: bool = False
    attributes: tuple[str, str] = ("", "")


class BetweenTags(CallFormat):
    """Calls of one family.

    Args:
        name: for `--tool-parser`.
        tags: how it writes them.
        sign: what its chat templates have.
    """

    def __init__(self, name: str, tags: Tags, sign: str) -> None:
        self.name, self._tags, self._sign = name, tags, sign
        self.marks = tags.marks
        parts = (tags.call, tags.parameter, tags.valued, tags.value, tags.value_end, tags.call_end)
        # Some tokenizers have tokens of whole tags.
        self.shown = tuple(filter(None, (*parts, *tags.ends)))

    def matches(self, template: str) -> bool:
        """By a tag that no other family has."""
        return self._sign in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """One pair of marks for each call; texts as they are, all else as JSON."""
        tags, line = self._tags, "\n" if self._tags.lines else ""
        pairs = [*zip(tags.marks, tags.ends, strict=True)]
        mark, end = next((pair for pair in pairs if pair[0] in template), pairs[0])
        value_end = f"{line}{tags.value_end}\n"
        value = f"\n{tags.value}" if tags.value else line
        texts, others = (
            (f"{tags.parameter}{{}}{attribute}{tags.valued}{value}", value_end)
            for attribute in tags.attributes
        )
        begin, after = f"{mark}\n{tags.call}" if tags.call else mark, f"{tags.named}\n"
        closing = f"{tags.call_end}\n{end}" if tags.call_end else end
        made = tuple(
            Tag(f"{begin}{c.name}{after}", arguments_between(c.schema, texts, others), closing)
            for c in calls
        )
        return Tagged(made, separator="\n", triggers=() if must else (mark,))

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """All calls behind one mark. Each argument is sent once it is complete."""
        tags = self._tags
        yield from space(source)
        if tags.call:
            yield from literal(source, tags.call)
        while True:
            if tags.named:
                name = yield from until(source, tags.named, MOST_NAME)
            else:
                name = yield from _word(source)
            name = name.partition('"')[0].strip(WHITESPACE)
            if not name or not _NO_NAME.isdisjoint(name):
                raise Unexpected
            calls.begin(name)
            yield from self._arguments(source, calls, kinds_of(calls.schemas.get(name, "")))
            if not tags.call_end:
                return
            yield from space(source)
            found = yield from one_of(source, (tags.call, *tags.ends))
            if found != tags.call:
                return

    def _arguments(self, source: Source, calls: Calls, kinds: Mapping[str, Kinds]) -> Grammar:
        tags, before = self._tags, "{"
        ends = (tags.call_end,) if tags.call_end else tags.ends
        while True:
            yield from space(source)
            found = yield from one_of(source, (tags.parameter, *ends), stay=True)
            if found != tags.parameter:
                break
            yield
            header = yield from until(source, tags.valued, MOST_NAME)
            key, _, attributes = header.partition('"')
            if tags.value:
                yield from space(source)
                yield from literal(source, tags.value)
            raw = yield from until(source, tags.value_end)
            key = key.strip(WHITESPACE)
            of_key = kinds.get(key)
            if _IS_TEXT in attributes:
                of_key = _TEXT
            elif _IS_JSON in attributes:
                of_key = _NO_TEXT
            value = json_of(_of_lines(raw) if tags.lines else raw, of_key)
            calls.more(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
            before = ", "
        calls.more("{}" if before == "{" else "}")
        calls.end()
        yield


def _word(source: Source) -> Reading:
    """Up to whitespace or a tag."""
    taken: list[str] = []
    while source.char and source.char not in WHITESPACE and source.char != "<":
        if len(taken) > MOST_NAME:
            raise Unexpected
        taken.append(source.char)
        yield
    return "".join(taken)


def _of_lines(raw: str) -> str:
    """A value without the line's ends around it."""
    return raw.removeprefix("\n").removesuffix("\n")


QWEN3_CODER = BetweenTags(
    "qwen3_coder",
    Tags(
        ("<tool_call>",),
        call="<function=",
        named=">",
        parameter="<parameter=",
        valued=">",
        value_end="</parameter>",
        call_end="</function>",
        ends=("</tool_call>",),
        lines=True,
    ),
    sign="<function=",
)
GLM = BetweenTags(
    "glm",
    Tags(
        ("<tool_call>",),
        call="",
        named="",
        parameter="<arg_key>",
        valued="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        ends=("</tool_call>",),
    ),
    sign="<arg_key>",
)
MINIMAX = BetweenTags(
    "minimax",
    Tags(
        ("<minimax:tool_call>",),
        call='<invoke name="',
        named='">',
        parameter='<parameter name="',
        valued='">',
        value_end="</parameter>",
        call_end="</invoke>",
        ends=("</minimax:tool_call>",),
    ),
    sign="<minimax:tool_call>",
)
DEEPSEEK_DSML = BetweenTags(
    "deepseek_dsml",
    Tags(
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        call='<｜DSML｜invoke name="',
        named='">',
        parameter='<｜DSML｜parameter name="',
        valued=">",
        attributes=(f'" {_IS_TEXT}', f'" {_IS_JSON}'),
        value_end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    ),
    sign="｜DSML｜",
)
