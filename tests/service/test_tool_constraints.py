# ruff: noqa: RUF001 - the models' tokens have such characters
"""What a model may write of calls, per family: the family's own parser reads it back, as JSON."""

from __future__ import annotations

import json
import random
import re
from itertools import count
from typing import Any

import jsonschema
import numpy as np
import pytest
from msgspec import structs

from support.engines import constrained
from tokenpod.core.constraints import (
    Argument,
    Arguments,
    Constraint,
    JsonSchema,
    Reasoned,
    Tag,
    Tagged,
    compacted,
)
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.service.calls.chats import ChatMessage, ChatPrompt, Tool
from tokenpod.service.calls.parts import Part
from tokenpod.service.constraints.json_schema import MOST_SCHEMAS
from tokenpod.service.text.parsers.calls import CallParser, ToolsError
from tokenpod.service.text.parsers.turn import CALL_FORMATS
from tokenpod.service.text.workers.text_worker import calls_constraint

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
#: Tools for families that write texts without quotes: of any text random choices would see no end.
BARE_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "12", "x y"]},
        "days": {"type": "integer"},
        "place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["city", "place"],
    "additionalProperties": False,
}
BARE_TOOLS = [Tool("bare", "", json.dumps(BARE_SCHEMA)), Tool("none")]
BARE_FAMILIES = [
    *(("qwen3_coder", "<function="), ("glm", "<arg_key>"), ("minimax", "<minimax:tool_call>")),
    *(("deepseek", ""), ("deepseek", "```json"), ("deepseek_dsml", "<｜DSML｜tool_calls>")),
    *(("kimi", ""), ("gemma4", ""), ("harmony", "")),
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
    tools = [*TOOLS, *BARE_TOOLS]
    parser = CallParser(
        FORMATS[name],
        [t.name for t in tools],
        lambda: f"call{next(numbers)}",
        {t.name: t.schema for t in tools},
    )
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


@pytest.mark.parametrize(("name", "template"), BARE_FAMILIES)
def test_calls_with_bare_texts_are_valid_too(library: Guidance, name: str, template: str) -> None:
    asked = ChatPrompt([ChatMessage("user", "x")], tools=BARE_TOOLS, must_call=True)
    constraint = compacted(calls_constraint(asked, FORMATS[name], template))
    found = set()
    for seed in range(12):
        parts = parts_of(name, written(library, constraint, seed))
        calls = calls_in(parts)
        assert calls
        assert not "".join(p.text for p in parts if p.kind.name == "TEXT").strip()
        for tool, arguments in calls:
            found.add(tool)
            schema = BARE_SCHEMA if tool == "bare" else {"maxProperties": 0}
            jsonschema.validate(arguments, schema)
    assert found == {"bare", "none"}
    only = structs.replace(asked, only="none")
    constraint = calls_constraint(only, FORMATS[name], template)
    assert calls_in(parts_of(name, written(library, constraint, 3))) == [("none", {})]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":[1,2],"b":"x  y"}', True),
        ('{"a": [1, 2], "b": "x"}', True),
        ('{"a": [1,  2]}', False),
        ('{ "a": []}', False),
        ('{"a": []\n}', False),
    ],
)
def test_compact_json_has_a_space_behind_a_comma_or_a_colon_and_no_other(
    library: Guidance, text: str, allowed: bool
) -> None:
    kinds = {"a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}}
    schema = JsonSchema(json.dumps({"type": "object", "properties": kinds}))
    for constraint, wanted in ((compacted(schema), allowed), (schema, True)):
        matcher = library.compile(constraint)
        taken = 0
        for byte in text.encode():
            words = np.zeros(-(-len(TOKENS) // 32), np.int32)
            matcher.fill(words)
            token = TOKENS.index(bytes([byte]))
            if not words[token // 32] >> (token % 32) & 1:
                break
            matcher.take(token)
            taken += 1
        assert (taken == len(text.encode())) == wanted
    within = Tag("x", Arguments((Argument("y", schema, "z", needed=True),)), "w")
    (tag,) = compacted(Reasoned("<a>", "</a>", False, Tagged((within,)))).answer.tags  # type: ignore[union-attr]
    assert tag.inside.each[0].inside == compacted(schema)


def test_a_bare_text_is_any_up_to_its_tag(library: Guidance) -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    tool = Tool("bare", "", json.dumps(schema))
    asked = ChatPrompt([], tools=[tool], must_call=True, only="bare")
    text = (
        "<tool_call>\n<function=bare>\n<parameter=code>\nif a < b:\n  1\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    matcher = library.compile(calls_constraint(asked, FORMATS["qwen3_coder"], ""))
    for byte in text.encode():
        matcher.take(TOKENS.index(bytes([byte])))
    assert matcher.whole
    ((_, arguments),) = calls_in(parts_of("qwen3_coder", text))
    assert arguments == {"code": "if a < b:\n  1"}


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


#: Harmony's special tokens, beyond the demo model's vocabulary.
MARKS = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "constrain")]
HEAD = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
VALID = '{"city": "Rome", "unit": "C"}'


def harmony_tokens(text: str) -> list[int]:
    """Its marks as tokens of their own, all else as bytes."""
    pieces = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    known = constrained.TOKENS.tokens
    found: list[int] = []
    for piece in pieces:
        if piece in MARKS:
            found.append(len(known) + MARKS.index(piece))
        else:
            found += [TOKENS.index(bytes([byte])) for byte in piece.encode()]
    return found


@pytest.mark.parametrize(
    ("text", "refused_at"),
    [
        ("<|channel|>final<|message|>Any {text} to=functions.weather.", ""),
        (f"{CALL}{VALID}", ""),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD}{CALL}{VALID}", ""),
        (f"<|channel|>commentary<|message|>Let me.<|end|>{HEAD}{CALL}{VALID}", ""),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{HEAD}<|channel|>final<|message|>So.", ""),
        (CALL.replace("weather", "other"), "other"),
        (f'{CALL}{{"city": 1', "1"),
        (f'{CALL}{{"unit": "C"', "u"),
        (f"{CALL}no JSON", "n"),
        (f"{CALL}{VALID} more", " "),
        ("text outside of messages", "t"),
    ],
)
@pytest.mark.parametrize("reasoned", [False, True])
def test_in_auto_harmonys_texts_are_free_and_calls_are_valid(
    text: str, refused_at: str, reasoned: bool
) -> None:
    tokens = [*constrained.TOKENS.tokens, *(mark.encode() for mark in MARKS)]
    special = {mark: at for at, mark in enumerate(MARKS, len(constrained.TOKENS.tokens))}
    harmony = Guidance(tokens, [*constrained.TOKENS.special, *special.values()])
    asked = ChatPrompt([ChatMessage("user", "x")], tools=TOOLS[:2])
    constraint: Constraint = calls_constraint(asked, FORMATS["harmony"], "")
    if reasoned:
        assert isinstance(constraint, Tagged)
        # As a service asks it: the first message may be the reasoning.
        constraint = Reasoned("<|channel|>analysis<|message|>", "<|end|>", False, constraint)
    matcher = harmony.compile(constraint)
    words, taken = np.zeros(-(-len(tokens) // 32), np.int32), 0
    wanted = harmony_tokens(text)
    for token in wanted:
        matcher.fill(words)
        if not words[token // 32] >> (token % 32) & 1:
            break
        matcher.take(token)
        taken += 1
    if not refused_at:
        assert taken == len(wanted)
        assert matcher.whole
        read = calls_in(parts_of("harmony", text))
        assert read == ([("weather", json.loads(VALID))] if CALL in text else [])
    else:
        assert b"".join(tokens[t] for t in wanted[taken:]).decode().startswith(refused_at)


def test_in_auto_one_call_a_turn_of_harmony_may_still_have_other_messages() -> None:
    asked = ChatPrompt([], tools=TOOLS[:1], several_calls=False)
    assert calls_constraint(asked, FORMATS["harmony"], "").most is None
    must = structs.replace(asked, must_call=True)
    assert calls_constraint(must, FORMATS["harmony"], "").most == 1


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


@pytest.mark.sampled(5, "slow")
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
