"""Llama 3.2 and 4: a turn that is a list of Python calls with named arguments."""

from __future__ import annotations

import json
import math
import re
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tokenpod.core.constraints import Argument, Arguments, JsonSchema, Tag, Tagged
from tokenpod.service.text.parsers.calls import (
    MOST_WRITTEN,
    TOO_LONG,
    CallFormat,
    Calls,
    ToolCallShape,
    ToolsError,
)
from tokenpod.service.text.parsers.grammar import (
    Grammar,
    Reading,
    Source,
    Unexpected,
    entries,
    literal,
    quoted,
    space,
    word,
)

_QUOTE = '"'
#: A name that can be an argument's.
_ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
#: What names and numbers have besides letters and digits.
_WORD_MARKS = "_-+."
#: Lists and dicts within each other.
_DEEPEST = 64
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {word: word for word in ("true", "false", "null")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset(string.hexdigits)


class Pythonic(CallFormat):
    """`[f(x=1, y=["a"]), g()]`, with `<|python_start|>` before it or not."""

    name = "pythonic"
    marks = ("<|python_start|>",)
    shown = ("<|python_end|>",)
    openings = "["

    def matches(self, template: str) -> bool:
        """By what it tells the model of calls."""
        return "[func_name1(" in template

    def tagged(self, calls: Sequence[ToolCallShape], template: str, *, must: bool) -> Tagged:
        """A list of calls; within text only behind the mark."""
        tags = tuple(Tag(f"{call.name}(", _named(call.schema), ")") for call in calls)
        if must:
            return Tagged(tags, before="[", separator=", ", after="]")
        before, after = f"{self.marks[0]}[", f"]{self.shown[0]}"
        return Tagged(tags, before=before, separator=", ", after=after, triggers=self.marks)

    def read(self, source: Source, calls: Calls, *, marked: bool) -> Grammar:
        """All calls of the request's tools, each reported once it is complete; others are text."""
        yield from space(source)
        yield from literal(source, "[")
        while True:
            yield from space(source)
            name = yield from word(source, _WORD_MARKS)
            if name not in calls.tools:
                raise Unexpected
            arguments = yield from _arguments(source)
            calls.begin(name)
            calls.more(arguments)
            calls.end()
            yield
            yield from space(source)
            if source.char != ",":
                break
            yield
        yield from literal(source, "]")
        yield from space(source)
        if marked and source.char == "<":
            yield from literal(source, self.shown[0])


def _named(schema: Mapping[str, Any]) -> Arguments:
    """An object's properties as named arguments: what they refer to goes with each."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    needed = {name for name in schema.get("required", []) if isinstance(name, str)}
    found, size = list[Argument](), 0
    for name, each in schema.get("properties", {}).items():
        if _ARGUMENT.fullmatch(name):
            text = json.dumps(each | shared if isinstance(each, dict) else shared)
            # Each has the definitions: together they may be as long as the schema's square.
            size += len(text)
            if size > MOST_WRITTEN:
                raise ToolsError(TOO_LONG)
            found.append(Argument(f"{name}=", JsonSchema(text), "", name in needed))
    return Arguments(tuple(found), separator=", ")


def _arguments(source: Source) -> Reading:
    """What stands in parentheses, as a JSON object; it ends at the last one, not behind it."""

    def argument() -> Reading:
        name = yield from word(source, _WORD_MARKS)
        yield from space(source)
        yield from literal(source, "=")
        value = yield from _value(source, 0)
        return f"{_json(name)}: {value}"

    yield from literal(source, "(")
    found = yield from entries(source, ")", argument)
    return f"{{{', '.join(found)}}}"


def _value(source: Source, depth: int) -> Reading:
    """A literal of Python as JSON."""
    yield from space(source)
    char = source.char
    if depth == _DEEPEST:
        raise Unexpected
    if char == "[":
        return (yield from _several(source, "]", depth))
    if char == "{":
        return (yield from _several(source, "}", depth))
    if char and char in "\"'":
        taken: list[str] = []
        yield from quoted(source, taken.append)
        return _json(_unescaped("".join(taken[1:-1])))
    found = yield from word(source, _WORD_MARKS)
    if found in _CONSTANTS:
        return _CONSTANTS[found]
    try:
        json.loads(found, parse_constant=_no_number)
    except ValueError as error:
        raise Unexpected from error
    # JSON's grammar allows 1e999, but many clients can't read it: decoders of Go and Rust refuse
    # it, those of JavaScript and Python make an infinity of it, which has no JSON.
    if not math.isfinite(float(found)):
        raise Unexpected
    # As the model wrote it: a float might have rounded it.
    return found


def _several(source: Source, end: str, depth: int) -> Reading:
    """The entries of a list or a dict."""
    opening = source.char

    def entry() -> Reading:
        key = yield from _value(source, depth + 1)
        if end == "]":
            return key
        yield from space(source)
        yield from literal(source, ":")
        value = yield from _value(source, depth + 1)
        return f"{key if key.startswith(_QUOTE) else _json(key)}: {value}"

    yield
    found = yield from entries(source, end, entry)
    yield
    return f"{opening}{', '.join(found)}{end}"


def _unescaped(text: str) -> str:
    """What a string of Python stands for; an escape that is none stays."""
    if "\\" not in text:
        return text
    found: list[str] = []
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char != "\\" or at == len(text):
            found.append(char)
            continue
        kind = text[at]
        at += 1
        if kind in _CODES:
            digits = text[at : at + _CODES[kind]]
            found.append(_coded(kind, digits))
            at += len(digits)
        else:
            found.append(_ESCAPES.get(kind) or (kind if kind in "\\'\"" else f"\\{kind}"))
    return "".join(found)


def _coded(kind: str, digits: str) -> str:
    if len(digits) < _CODES[kind] or not _HEX.issuperset(digits):
        raise Unexpected
    code = int(digits, 16)
    if code > sys.maxunicode:
        raise Unexpected
    return chr(code)


def _no_number(word: str) -> NoReturn:
    """JSON has no NaN and no infinity."""
    raise ValueError(word)


def _json(text: str) -> str:
    """A JSON string. Halves of characters become U+FFFD: no message could hold them."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)
