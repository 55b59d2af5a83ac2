"""Constraints that are nearly right, the same for the same seed: JSON schemas, regexes, grammars.

Each begins as one that is served and is changed in a few places, so that many get past the checks
and into the compiler.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tokenpod.service.calls.call import AskedConstraint, ConstraintKind
from tokenpod.service.constraints.json_schema import SUPPORTED

_SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "exclusiveMaximum": 99},
            "b": {"type": ["string", "null"], "minLength": 1, "maxLength": 5},
            "c": {"$ref": "#/$defs/c"},
        },
        "required": ["a", "c"],
        "additionalProperties": False,
        "$defs": {"c": {"enum": ["x", 1, None, {"y": [2]}]}},
    },
    {"type": "array", "items": {"$ref": "#"}, "minItems": 0, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "number"}},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"$ref": "#/anyOf/0"}, {"const": 5}]},
    {"allOf": [{"type": "integer", "multipleOf": 3}, {"maximum": 30}, {"minimum": -7.5}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "format": "date-time"}]},
    {"type": "object", "patternProperties": {"^x": {"format": "uuid"}}, "minProperties": 1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {"id": "#n"}}},
    {"type": "string", "format": "hostname", "allOf": [{"maxLength": 9}], "title": "a name"},
]
_REGEXES = [
    "[a-z]{1,3}",
    r"(\d+)(\.\d+)?([eE][+-]?\d{1,3})?",
    "(yes|no|maybe)+",
    r"\p{L}+[^\s\x00-\x1f]*?(?i:end)",
    r'\{[ ]?"a"[ ]?:[ ]?(true|false)[ ]?\}',
    "a|b|",
    r"^[[:alpha:]&&[^aeiou]]$",
]
_LARKS = [
    'start: "x" DIGIT+\nDIGIT: /[0-9]/\n',
    'start: a | b\na: "(" start ")" -> nested\nb: /[a-z]{1,3}/i\n%ignore /[ \\t]+/\n',
    'start: item ("," item)*\nitem[capture, max_tokens=5]: %json {"type": "integer"}\n',
    'start: (A | B)~2..4\nA.2: "é"\nB: A "\\u0041" \'c\'?\n// a comment\n',
    'start: text "!"\ntext[lazy]: /(.|\\n)*/\n',
    'start: "a" start?\n%import common.INT\n',
]
_GBNFS = [
    'root ::= "x" [0-9]{1,3}\n',
    'root ::= item ("," ws item)*\nitem ::= [^"\\\\\\n]+ | "\\"" root "\\""\nws ::= [ \\t]*\n',
    'root ::= (a | b)+ # a comment\na ::= "\\x41"\nb ::= [\\u4e00-\\u9fff] .? a{2,}\n',
]
_TAGS: list[Any] = [
    {
        "structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}],
        "triggers": ["<a"],
    },
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "tags": [
                {"begin": "<b>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ""},
                {"begin": "<c>", "content": {"type": "any_text"}, "end": "</c>"},
            ],
            "triggers": ["<b", "<c>"],
            "at_least_one": True,
        },
    },
    {
        "type": "structural_tag",
        "format": {
            "type": "tags_with_separator",
            "tags": [
                {
                    "begin": "[",
                    "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                    "end": "]",
                }
            ],
            "separator": ", ",
        },
    },
]
#: In the place of any value of JSON.
_VALUES: list[Callable[[random.Random], Any]] = [
    *(lambda _, value=value: copy.deepcopy(value) for value in (None, True, False, [], {}, "")),
    *(lambda _, value=value: value for value in (0, -1, 1, 2, 3, 10**20, 0.5, -1e308, 1e-300)),
    *(lambda _, value=value: value for value in ("²", "#", "a", "\0", "\ud800", "é", "x" * 3000)),
    *(lambda _, value=value: [value] for value in (None, {}, [], "a", 1, "\udfff")),
    lambda chance: {chance.choice(_KEYWORDS): {}},
    lambda chance: chance.choice(_NAMES),
    lambda chance: _pointer(chance),
    lambda chance: chance.choice(_REGEXES),
    lambda chance: copy.deepcopy(chance.choice(_SCHEMAS)),
    lambda chance: _nested([], chance.choice([90, 200, 700])),
    lambda _: int("9" * 4000),
]
_KEYWORDS = [*sorted(SUPPORTED), "not", "uniqueItems", "nullable", "default", "x-guidance"]
_ODD_KEYS = [*_KEYWORDS, "\ud800", "a/b~", "\U0001f600" * 700]
_NAMES = ["string", "integer", "object", "array", "date", "time", "email", "uri", "unknown", "json"]
#: Parts of regexes and grammars.
_PIECES = [
    *"()[]{}|*+?.^$\\/-,:;~#=<>%@&!'\"aZ0",
    *(r"\d", r"\D", r"\w", r"\s", r"\b", r"\p{L}", r"\pN", r"\x", r"\x41", r"\u0041", r"\Q", "[[:"),
    *(r"\U0010ffff", r"\u{110000}", r"\ud800", r"\1", r"\k<a>", "[]", "[^]", ":]]", "&&", "(?i)"),
    *(
        "(?:a)",
        "(?P<n>a)",
        "(?<n>b)",
        "(?=",
        "(?<=",
        "(?#",
        "{2}",
        "{2,}",
        "{,2}",
        "{3,1}",
        "{99999}",
    ),
    *(
        "{1000}{1000}",
        "::=",
        "->",
        "start",
        "root",
        "%ignore",
        "%import",
        "%json",
        "%regex",
        "%lark",
    ),
    *("%declare", "%llguidance", "[lazy]", "[capture]", "[max_tokens=0]", '[stop="x"]', "<[5]>"),
    *("<[0-9]>", "<|x|>", "~2..4", "~9", "//", "/*", "*/", "\n", "\t", " ", "\r\n", "\0", "\u2028"),
    *("²", "é", "\U0001f600", "\U0001f600" * 200, "x" * 500, "(" * 300, "[" * 90),
]


def odd_constraints(seed: int, count: int) -> Iterator[AskedConstraint]:
    """So many, of all kinds."""
    chance = random.Random(seed)
    for _ in range(count):
        yield chance.choice(_KINDS)(chance)


def odd_schema(chance: random.Random) -> str:
    """A JSON schema as text, which may be no JSON."""
    return _json(copy.deepcopy(chance.choice(_SCHEMAS)), chance)


def _asked(kind: ConstraintKind, text: str) -> AskedConstraint:
    return AskedConstraint(kind, "constraint", text)


_KINDS: list[Callable[[random.Random], AskedConstraint]] = [
    *[lambda chance: _asked(ConstraintKind.JSON_SCHEMA, odd_schema(chance))] * 4,
    *[lambda chance: _asked(ConstraintKind.REGEX, _changed(chance.choice(_REGEXES), chance))] * 2,
    *[lambda chance: _asked(ConstraintKind.GRAMMAR, _changed(chance.choice(_LARKS), chance))] * 2,
    *[lambda chance: _asked(ConstraintKind.GRAMMAR, _changed(chance.choice(_GBNFS), chance))] * 2,
    lambda chance: _asked(
        ConstraintKind.STRUCTURAL_TAG, _json(copy.deepcopy(chance.choice(_TAGS)), chance)
    ),
]


def _json(value: Any, chance: random.Random) -> str:
    """JSON text of a value with some of its parts changed."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        value = _with_change(value, chance)
    text = json.dumps(value)
    return _changed(text, chance) if chance.random() < 0.1 else text


def _with_change(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts replaced, taken away, renamed or given a new neighbour."""
    inside = value
    while isinstance(inside, dict | list) and inside:
        keys: list[Any] = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = chance.choice(keys)
        if isinstance(inside[key], dict | list) and inside[key] and chance.random() < 0.75:
            inside = inside[key]
            continue
        match chance.randrange(4 if isinstance(inside, dict) else 2):
            case 0:
                inside[key] = chance.choice(_VALUES)(chance)
            case 1:
                del inside[key]
            case 2:
                inside[chance.choice(_KEYWORDS)] = inside.pop(key)
            case _:
                inside[chance.choice(_ODD_KEYS)] = chance.choice(_VALUES)(chance)
        return value
    return chance.choice(_VALUES)(chance)


def _pointer(chance: random.Random) -> str:
    steps = [
        "anyOf",
        "allOf",
        "$defs",
        "c",
        "²",
        "٣",
        "-1",
        "0",
        "00",
        "1",
        "9" * 5000,
        "~0",
        "~2",
        "",
    ]
    return "#/" + "/".join(chance.choice(steps) for _ in range(chance.randint(1, 3)))


def _nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def _changed(text: str, chance: random.Random) -> str:
    """A text with some pieces put in, taken away, doubled or moved."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        at = chance.randint(0, len(text))
        to = min(len(text), at + chance.randint(1, 6))
        match chance.randrange(5):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:to] + text[at:]
            case 2:
                text = text[:at] + text[at:to][::-1] + text[to:]
            case _:
                text = text[:at] + chance.choice(_PIECES) + text[at:]
    return text
