"""What a model may write of calls, per family: the family's own parser reads it back, as JSON."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec import structs

from support.engines import constrained
from tokenpod.core.constraints import Constraint, Reasoned, Tagged
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.service.calls.chats import ChatMessage, ChatPrompt, Tool
from tokenpod.service.calls.parts import Part
from tokenpod.service.constraints.json_schema import MOST_SCHEMAS
from tokenpod.service.text.parsers.calls import CallParser, ToolsError
from tokenpod.service.text.parsers.turn import CALL_FORMATS
from tokenpod.service.text.workers.tool_constraints import calls_constraint

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    Tool("weather", "of a city", json.dumps(SCHEMA)),
    Tool("now"),
    Tool("odd", "has a schema that is not supported", '{"uniqueItems": true}'),
]
FORMATS = {each.name: each for each in CALL_FORMATS}
#: Each family, and what its template shows.
FAMILIES = [
    *(("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("mistral", "[TOOL_CALLS][ARGS]")),
    *(("llama3_json", "<|python_tag|>"), ("pythonic", "<|python_start|>")),
]
#: Special tokens, beyond the demo model's vocabulary.
SPECIAL = [b"[TOOL_CALLS]", b"[ARGS]", b"<|python_tag|>", b"<|python_start|>", b"<|python_end|>"]
TOKENS = [*constrained.TOKENS.tokens, *SPECIAL]
SPECIAL_IDS = [*constrained.TOKENS.special, *range(len(TOKENS) - len(SPECIAL), len(TOKENS))]


@pytest.fixture(scope="module")
def library() -> Guidance:
    return Guidance(TOKENS, SPECIAL_IDS)


def written(library: Guidance, constraint: Constraint, seed: int, lead: bytes = b"") -> str:
    """A text that random choices make under a constraint, which ends as soon as it may."""
    matcher, chance = library.compile(constraint), random.Random(seed)
    words, made = np.zeros(-(-len(TOKENS) // 32), np.int32), b""
    for byte in lead:
        matcher.take(TOKENS.index(bytes([byte])))
        made += bytes([byte])
    for _ in range(2000):
        may_end = matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if may_end and (not len(allowed) or chance.random() < 0.5):
            return made.decode(errors="replace")
        token = int(chance.choice(allowed.tolist()))
        matcher.take(token)
        made += TOKENS[token]
    raise AssertionError(f"no end: {made[-200:]!r}")


def parts_of(name: str, text: str) -> list[Part]:
    numbers = count()
    parser = CallParser(FORMATS[name], [t.name for t in TOOLS], lambda: f"call{next(numbers)}")
    return [*parser.push(text), *parser.finish()]


def calls_in(parts: list[Part]) -> list[tuple[str, dict[str, Any]]]:
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if part.call is not None and part.kind.name == "CALL":
            name, arguments = calls.get(part.call, ("", ""))
            calls[part.call] = (name or part.name, arguments + part.text)
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


def chat(**more: Any) -> ChatPrompt:
    return ChatPrompt([ChatMessage("user", "x")], tools=TOOLS[:2], must_call=True, **more)


@pytest.mark.parametrize(("name", "template"), FAMILIES)
def test_calls_that_must_be_made_are_calls_with_valid_arguments(
    library: Guidance, name: str, template: str
) -> None:
    constraint = calls_constraint(chat(), FORMATS[name], template)
    several = 0
    for seed in range(12):
        parts = parts_of(name, written(library, constraint, seed))
        calls = calls_in(parts)
        assert calls
        assert not "".join(p.text for p in parts if p.kind.name == "TEXT").strip()
        several += len(calls) > 1
        for tool, arguments in calls:
            assert tool in ("weather", "now")
            jsonschema.validate(arguments, SCHEMA if tool == "weather" else {"maxProperties": 0})
    assert several


@pytest.mark.parametrize(("name", "template"), FAMILIES)
def test_a_tool_that_is_named_is_called_once(library: Guidance, name: str, template: str) -> None:
    constraint = calls_constraint(chat(only="now"), FORMATS[name], template)
    for seed in range(3):
        assert calls_in(parts_of(name, written(library, constraint, seed))) == [("now", {})]


@pytest.mark.parametrize(("name", "template"), FAMILIES)
def test_in_auto_there_is_text_and_marks_begin_valid_calls(
    library: Guidance, name: str, template: str
) -> None:
    asked = ChatPrompt([ChatMessage("user", "x")], tools=TOOLS[:2])
    constraint = calls_constraint(asked, FORMATS[name], template)
    assert written(library, constraint, 1) is not None
    (mark,) = FORMATS[name].marks
    special = mark.encode() in SPECIAL
    matcher = library.compile(constraint)
    for text in ("so ", mark, " more"):
        for token in [TOKENS.index(text.encode())] if special and text == mark else text.encode():
            at = token if special and text == mark else TOKENS.index(bytes([token]))
            words = np.zeros(-(-len(TOKENS) // 32), np.int32)
            matcher.fill(words)
            allowed = bool(words[at // 32] >> (at % 32) & 1)
            assert allowed == (text != " more"), (text, at)
            if not allowed:
                return
            matcher.take(at)


def test_a_schema_that_is_not_supported_means_any_object(library: Guidance) -> None:
    overlapping = '{"oneOf": [{"type": "object"}, {"type": "object", "maxProperties": 9}]}'
    tools = [TOOLS[2], Tool("too", "", overlapping)]
    for tool in tools:
        asked = ChatPrompt([], tools=[tool], must_call=True, only=tool.name)
        constraint = calls_constraint(asked, FORMATS["hermes"], "")
        assert isinstance(constraint, Tagged)
        call = json.dumps({"name": tool.name, "arguments": {"a": [1, None]}})
        text = f"<tool_call>\n{call}\n</tool_call>"
        matcher = library.compile(constraint)
        for byte in text.encode():
            matcher.take(TOKENS.index(bytes([byte])))
        assert matcher.whole


def test_reasoning_comes_before_what_is_asked_for(library: Guidance) -> None:
    calls = calls_constraint(chat(only="now"), FORMATS["hermes"], "")
    assert isinstance(calls, Tagged)
    text = "hm, </x>\n</think>\n\n" + '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for is_open, begin in ((True, ""), (False, "<think>")):
        matcher = library.compile(Reasoned("<think>", "</think>", is_open, calls))
        for byte in (begin + text).encode():
            matcher.take(TOKENS.index(bytes([byte])))
        assert matcher.whole


@pytest.mark.parametrize(("name", "template"), FAMILIES)
def test_tools_with_too_many_schemas_are_refused_together(name: str, template: str) -> None:
    half = {"properties": {f"p{at}": {"format": "date-time"} for at in range(MOST_SCHEMAS // 2)}}
    tools = [Tool("a", "", json.dumps(half)), Tool("b", "", json.dumps(half))]
    asked = ChatPrompt([], tools=tools[:1], must_call=True)
    assert len(calls_constraint(asked, FORMATS[name], template).tags) == 1
    with pytest.raises(ToolsError, match=f"more than {MOST_SCHEMAS} schemas"):
        calls_constraint(structs.replace(asked, tools=tools), FORMATS[name], template)


def test_definitions_that_each_argument_repeats_are_limited() -> None:
    words = {f"d{at}": {"enum": ["x" * 50]} for at in range(2000)}
    uses = {f"p{at}": {"$ref": f"#/$defs/d{at}"} for at in range(2000)}
    schema = json.dumps({"type": "object", "$defs": words, "properties": uses})
    asked = ChatPrompt([], tools=[Tool("f", "", schema)], must_call=True)
    with pytest.raises(ToolsError, match="more than 8388608 bytes"):
        calls_constraint(asked, FORMATS["pythonic"], "")
    assert calls_constraint(asked, FORMATS["hermes"], "").tags


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "schema",
    [
        '{"format": []}',
        '{"properties": {"a": {}}, "required": 5}',
        '{"properties": {"a": {"enum": ["\\ud800"]}}}',
        '{"anyOf": [{"type": "object"}], "$ref": "#/anyOf/²"}',
    ],
)
def test_a_schema_that_makes_no_sense_means_any_object(
    library: Guidance, name: str, schema: str
) -> None:
    asked = ChatPrompt([], tools=[Tool("now", "", schema)], must_call=True, only="now")
    constraint = calls_constraint(asked, FORMATS[name], "")
    ((tool, arguments),) = calls_in(parts_of(name, written(library, constraint, 1)))
    assert (tool, type(arguments)) == ("now", dict)
