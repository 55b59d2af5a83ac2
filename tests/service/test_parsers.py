"""What a model writes in a chat, told apart: every family's form, whatever the pieces are."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.service.calls.parts import Kind, Part, Parts
from tokenpod.service.config.settings import Settings
from tokenpod.service.text.parsers.reasoning import ReasoningFormat
from tokenpod.service.text.parsers.turn import (
    CALL_FORMATS,
    REASONING_FORMATS,
    Formats,
    TurnParser,
    formats_of,
    new_call_id,
)

FORMATS = {each.name: each for each in CALL_FORMATS}
THINK, MISTRAL_THINK = REASONING_FORMATS
TOOLS = ("f", "get_weather")


def turn(
    name: str, *, opened: bool = False, several: bool = True, reasoning: ReasoningFormat = THINK
) -> TurnParser:
    ids = (f"id{at}" for at in itertools.count())
    return TurnParser(
        Formats(FORMATS[name], reasoning),
        prompt_end=f"assistant\n{reasoning.begin}\n" if opened else "assistant\n",
        tools=TOOLS,
        several=several,
        new_id=ids.__next__,
    )


def told(parser: TurnParser, pieces: Sequence[str]) -> list[Part]:
    """What the pieces bring, put together: the same whatever they are."""
    parts = Parts()
    for piece in pieces:
        for part in parser.push(piece):
            parts.add(part)
    for part in parser.finish():
        parts.add(part)
    return parts.take()


def read(name: str, text: str, **options: bool) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning, and the names and arguments of calls."""
    parts = told(turn(name, **options), [text])
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if part.kind is Kind.CALL:
            name, arguments = calls.get(part.call, (part.name, ""))
            calls[part.call] = (name, arguments + part.text)
    texts = ["".join(p.text for p in parts if p.kind is kind) for kind in Kind]
    return texts[Kind.TEXT], texts[Kind.REASONING], list(calls.values())


ONE = ("f", '{"x": 1}')
TWO = ("get_weather", '{"city": "Köln \\"}]", "days": [1, {"a": null}]}')

WRITTEN: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "one": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", [ONE]),
    "text before, two calls": (
        "hermes",
        "Let me see.\n\n<tool_call>\n"
        f'{{"name": "f", "arguments": {ONE[1]}}}\n</tool_call>\n<tool_call>'
        f'{{"arguments": {TWO[1]}, "name": "get_weather"}}</tool_call>\n',
        "Let me see.",
        [ONE, TWO],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "no end": ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [ONE]),
    "cut off": ("hermes", '<tool_call>{"name": "f", "arguments": {"x', "", [("f", '{"x')]),
    "cut off behind": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}\n</too',
        "",
        [("f", "{}")],
    ),
    "text behind": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>\nDone.',
        "\nDone.",
        [ONE],
    ),
    "no call": ("hermes", "x <tool_call> is a tag", "x <tool_call> is a tag", []),
    "no name": (
        "hermes",
        ' <tool_call>{"a": 1}</tool_call>',
        ' <tool_call>{"a": 1}</tool_call>',
        [],
    ),
    "half a character for a name": (
        "hermes",
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        [],
    ),
    "an endless name": ("hermes", '<tool_call>{"' + "n" * 900, '<tool_call>{"' + "n" * 900, []),
    "a mark begins": ("hermes", "a < b <tool_ca", "a < b <tool_ca", []),
    "list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ONE[1]}}}, '
        f'{{"name": "get_weather", "arguments": {TWO[1]}, "id": "abcdefghi"}}]',
        "",
        [ONE, TWO],
    ),
    "names first": (
        "mistral",
        f"Hm. [TOOL_CALLS]f[ARGS]{ONE[1]}[TOOL_CALLS]get_weather{TWO[1]}",
        "Hm.",
        [ONE, TWO],
    ),
    "ids": ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{ONE[1]}", "", [ONE]),
    "a list of no calls": ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
    "bare": ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', "", [ONE]),
    "a type first": (
        "llama3_json",
        '\n{"type": "function", "name": "f", "parameters": {"x": 1}}',
        "",
        [ONE],
    ),
    "tagged": ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [ONE]),
    "two": (
        "llama3_json",
        f'{{"name": "f", "parameters": {ONE[1]}}};'
        f' {{"parameters": {TWO[1]}, "name": "get_weather"}}',
        "",
        [ONE, TWO],
    ),
    "an answer in JSON": (
        "llama3_json",
        '{"name": "Bob", "parameters": {"x": 1}}',
        '{"name": "Bob", "parameters": {"x": 1}}',
        [],
    ),
    "another answer in JSON": ("llama3_json", ' {"age": 3}', ' {"age": 3}', []),
    "JSON later on": ("llama3_json", 'So: {"name": "f", "parameters": {}}', None, []),  # type: ignore[dict-item]
    "python": (
        "pythonic",
        """[f(x=1), get_weather(city='Köln "}]', days=[1, {'a': None}])]""",
        "",
        [ONE, TWO],
    ),
    "numbers": (
        "pythonic",
        "[f(a=-1.5, b=True, c='it\\'s\\n\\u00e9', d={}, e=[])]",
        "",
        [("f", '{"a": -1.5, "b": true, "c": "it\'s\\né", "d": {}, "e": []}')],
    ),
    "tagged python": ("pythonic", "<|python_start|>[f(x=1)]<|python_end|>", "", [ONE]),
    "a list": ("pythonic", "[1, 2]", "[1, 2]", []),
    "another's function": ("pythonic", "[print(x=1)]", "[print(x=1)]", []),
    "no number": ("pythonic", "[f(x=NaN)]", "[f(x=NaN)]", []),
    "half a character": ("pythonic", "[f(x='\\ud800')]", "", [("f", '{"x": "\ufffd"}')]),
    "both halves": ("pythonic", "[f(x='\\ud83d\\ude00')]", "", [("f", '{"x": "😀"}')]),
    "a code that is none": ("pythonic", "[f(x='\\uZZZZ')]", "[f(x='\\uZZZZ')]", []),
    "a code beyond all": ("pythonic", '[f(x="\\U98765432")]', '[f(x="\\U98765432")]', []),
    "a code with a sign": ("pythonic", "[f(x='\\x+1')]", "[f(x='\\x+1')]", []),
    "a number beyond floats": ("pythonic", "[f(x=1e999)]", "[f(x=1e999)]", []),
    "many digits": ("pythonic", f"[f(x={'9' * 200})]", "", [("f", f'{{"x": {"9" * 200}}}')]),
    "too deep": ("pythonic", "[f(x=" + "[" * 99, "[f(x=" + "[" * 99, []),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_a_familys_calls_are_read(case: str) -> None:
    name, written, text, calls = WRITTEN[case]
    assert read(name, written) == (written if text is None else text, "", calls)
    # One by one, and behind reasoning.
    thought = f"<think>\nHm.\n</think>\n\n{written.lstrip()}"
    alone = told(turn(name), list(thought))
    assert alone == told(turn(name), [thought])
    assert alone[0] == Part(Kind.REASONING, "Hm.")


def test_without_tools_calls_are_text() -> None:
    written = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = TurnParser(Formats(FORMATS["hermes"], None))
    assert told(parser, [written]) == [Part(Kind.TEXT, written)]


def test_a_turn_of_one_call_is_over_with_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = turn("hermes", several=False)
    parts = parser.push(call[:-20])
    assert not parser.over
    parts += parser.push(call[-20:] + call)
    assert parser.over
    parts += parser.finish()
    assert {part.call for part in parts if part.kind is Kind.CALL} == {0}


REASONED = {
    "tagged": ("<think>\nSo,\n\nyes.\n</think>\n\nYes.", False, "Yes.", "So,\n\nyes."),
    "opened by the prompt": ("So.</think>Yes. ", True, "Yes. ", "So."),
    "cut off": ("<think>So, </thi", False, "", "So, </thi"),
    "empty": ("<think>\n\n</think>\n\nYes.", False, "Yes.", ""),
    "none": ("Yes, <think> is a tag.", False, "Yes, <think> is a tag.", ""),
    "a mark begins": (" <thi", False, " <thi", ""),
    "once": ("<think>a</think><think>b</think>", False, "<think>b</think>", "a"),
}


@pytest.mark.parametrize("case", REASONED)
def test_reasoning_is_told_from_the_answer(case: str) -> None:
    written, opened, text, reasoning = REASONED[case]
    assert read("hermes", written, opened=opened) == (text, reasoning, [])


def test_calls_in_reasoning_are_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read("hermes", f"<think>{call}</think>{call}") == ("", call, [("f", "{}")])


def test_other_marks_are_another_models() -> None:
    parser = TurnParser(Formats(None, MISTRAL_THINK))
    parts = told(parser, ["[THINK]So.[/THINK]Yes."])
    assert parts == [Part(Kind.REASONING, "So."), Part(Kind.TEXT, "Yes.")]


# -- any text, in any pieces -------------------------------------------------------------------

SCRAPS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<", "[", "{", "}", "]", ")", ";"),
    *(
        '{"name": "f", "arguments": {"x": [1, "}"]}}',
        '"arguments": ',
        '"parameters": {}',
        '"name": ',
    ),
    *('"f"', "f(", "x=", "f", "1", ", ", '"', "'", "\\", "\n", " ", " " * 40, ":", "é", "\0"),
    *("[f(x='a', y=[1])]", "True", "text", '"\\ud800"', "get_weather(city=''"),
    *("[f(x=", ")]", "1e999", "-1e999", "NaN", "Infinity", "\\U98765432", "\\U0010", "\\x", "1_0"),
]
TEXTS = st.lists(st.sampled_from(SCRAPS) | st.text(max_size=3), max_size=24).map("".join)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """A text in pieces of these sizes, again and again."""
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            return pieces
        pieces.append(text[at : at + size])
        at += size
    return pieces


WRITTEN_SO = [written for _, written, _, _ in WRITTEN.values()]


@st.composite
def edited(draw: st.DrawFn) -> str:
    """What a model may write: a family's calls with some characters lost, doubled or others."""
    text = draw(st.sampled_from(WRITTEN_SO))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(text)))
        end = min(begin + draw(st.integers(0, 5)), len(text))
        instead = draw(st.sampled_from(SCRAPS) | st.just(text[begin:end] * 2) | st.just(""))
        text = text[:begin] + instead + text[end:]
    return text


@pytest.mark.parametrize("name", FORMATS)
@given(
    text=TEXTS | edited(),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    opened=st.booleans(),
    reasoning=st.sampled_from(REASONING_FORMATS),
)
@example(
    text="<think>" + " " * 200 + "</think>" + " " * 200 + "<tool_call>",
    sizes=[3],
    opened=False,
    reasoning=THINK,
)
@example(text='[f(x="\\U98765432")]', sizes=[1], opened=False, reasoning=THINK)
@settings(max_examples=examples(250), deadline=None)
def test_pieces_make_no_difference_and_no_text_fails(
    name: str, text: str, sizes: list[int], opened: bool, reasoning: ReasoningFormat
) -> None:
    whole = told(turn(name, opened=opened, reasoning=reasoning), [text])
    assert told(turn(name, opened=opened, reasoning=reasoning), cut(text, sizes)) == whole
    calls = [part for part in whole if part.kind is Kind.CALL]
    for part in whole:
        (part.text + part.name).encode()
    assert all(part.name for part in calls if part.call_id)
    if not calls and not any(mark in text for mark in reasoning.marks) and not opened:
        assert "".join(part.text for part in whole) == text, "what is no call is text"


def strict(text: str) -> object:
    """A JSON text as a client reads it that knows floats of 64 bits alone."""
    (found,) = json.loads(
        f"[{text}]", parse_constant=pytest.fail, parse_int=finite, parse_float=finite
    )
    text.encode()
    return found


def finite(digits: str) -> float:
    assert math.isfinite(float(digits)), f"{digits} is no number to many clients"
    return float(digits)


@given(values=st.lists(st.sampled_from(SCRAPS) | st.text(max_size=4), max_size=6).map("".join))
@example(values='"\\U98765432"')
@example(values="{1e999: [1e999, -1e999]}")
@settings(max_examples=examples(300), deadline=None)
def test_the_arguments_of_a_python_call_are_json_for_every_client(values: str) -> None:
    for _, arguments in read("pythonic", f"[f(x={values})]")[2]:
        strict(arguments)


# -- names -------------------------------------------------------------------------------------

TEMPLATES = {
    ("hermes", "think"): "<tool_call>\n{...}\n</tool_call> {{ content.split('</think>') }}",
    ("mistral", None): "[AVAILABLE_TOOLS] [TOOL_CALLS]",
    ("mistral", "mistral"): "[TOOL_CALLS] [THINK]",
    ("llama3_json", None): '<|start_header_id|> {"name": name, "parameters": values}',
    ("pythonic", None): "<|header_start|> [func_name1(params_name1=params_value1)]",
    (None, None): "{{ messages }}",
    (None, "think"): "<think> <tool_call><function=name><parameter=x>",
}


@pytest.mark.parametrize("expected", TEMPLATES, ids=str)
def test_formats_are_found_in_templates(expected: tuple[str | None, str | None]) -> None:
    found = formats_of(TEMPLATES[expected], "auto", "auto")
    assert (found.calls and found.calls.name, found.reasoning and found.reasoning.name) == expected
    assert formats_of(TEMPLATES[expected], "none", "none") == Formats()
    named = formats_of(TEMPLATES[expected], "pythonic", "think")
    assert named == Formats(FORMATS["pythonic"], THINK)
    assert formats_of(None, "hermes", "think") == Formats(), "no chats without a template"


def test_every_format_has_its_setting() -> None:
    fields = Settings.model_fields
    for name, formats in {"tool": CALL_FORMATS, "reasoning": REASONING_FORMATS}.items():
        allowed = set(get_args(fields[f"{name}_parser"].annotation))
        assert allowed == {"auto", "none", *(each.name for each in formats)}


def test_ids_are_what_mistrals_templates_take() -> None:
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)
    assert json.dumps(sorted(ids))
