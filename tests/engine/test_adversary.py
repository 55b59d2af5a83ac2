"""Schemas made by chance against random choices: what ends conforms, by another validator."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from support.engines import constrained
from support.engines.demo_engine import demo_model
from tokenpod.core.constraints import JsonSchema
from tokenpod.core.outputs import FinishCode
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import LimitReached, Refused
from tokenpod.service.constraints.json_schema import check_schema, read_schema

WORDS = -(-constrained.VOCABULARY // 32)
#: More than any text of a bounded schema needs, spaces included.
MOST_TOKENS = 4000


@pytest.fixture(scope="module")
def library() -> Guidance:
    return Guidance(constrained.TOKENS.tokens, constrained.TOKENS.special)


def a_schema(chance: random.Random, depth: int = 0, *, bounded: bool = True) -> dict[str, Any]:
    """Of any kind; `bounded`: all of its texts are short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf", "tuple", "ref"] if depth < 3 else []
    below = lambda: a_schema(chance, depth + 1, bounded=bounded)  # noqa: E731
    match chance.choice(kinds):
        case "string":
            low = chance.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + chance.randrange(6)}
        case "integer":
            low = chance.randrange(-200, 200)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(300)}
        case "number" if bounded:
            return {"enum": [chance.randrange(99) / 4, -1.5e10]}
        case "number":
            return {"type": "number", "exclusiveMinimum": chance.randrange(-9, 9)}
        case "enum":
            return {"enum": chance.sample(["a", 'q"\\', 1, 2.5, None, True, ["x"], {"y": {}}], 3)}
        case "const":
            return {"const": chance.choice(["é", 0, [1, [2]], {"b": 1, "a": "x"}])}
        case "pattern":
            return {"type": "string", "pattern": chance.choice(["^[a-c]{2,4}$", "^(x|yz)?$"])}
        case "object":
            names = chance.sample(["a", "b", "c d", "é", "$x", 'q"'], chance.randrange(1, 4))
            made: dict[str, Any] = {name: below() for name in names}
            needed = [name for name in names if chance.random() < 0.5]
            closed = {"additionalProperties": False} if bounded else {}
            return {"type": "object", "properties": made, "required": needed} | closed
        case "array":
            low = chance.randrange(3)
            most = {"maxItems": low + chance.randrange(3)} if bounded else {}
            return {"type": "array", "items": below(), "minItems": low} | most
        case "tuple":
            items = [below() for _ in range(chance.randrange(1, 4))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "anyOf":
            return {"anyOf": [below(), below()]}
        case "ref":
            return {"$defs": {"r": below()}, "$ref": "#/$defs/r"} if depth == 0 else below()
        case kind:
            return {"type": kind}


def walk(library: Guidance, schema: dict[str, Any], chance: random.Random, most: int) -> str | None:
    """A text of random choices; None: it did not end."""
    text = json.dumps(schema)
    read = read_schema(text)
    for _ in check_schema(read):
        pass
    matcher, words, made = library.compile(JsonSchema(text)), np.zeros(WORDS, np.int32), b""
    for _ in range(most):
        may_end = matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        # The end is one token among those that are allowed.
        if may_end and chance.randrange(len(allowed) + 1) == 0:
            assert matcher.whole
            return made.decode()
        assert len(allowed), f"stuck after {made!r} under {text}"
        token = int(allowed[chance.randrange(len(allowed))])
        matcher.take(token)
        made += constrained.TOKENS.tokens[token]
    return None


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_text_of_a_bounded_schema_ends_and_validates(library: Guidance, count: int) -> None:
    refused = 0
    for seed in range(count):
        chance = random.Random(seed)
        schema = a_schema(chance)
        try:
            text = walk(library, schema, chance, MOST_TOKENS)
        except Refused:
            refused += 1
            continue
        assert text is not None, schema
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert refused < count / 10


def answers(
    count: int, *, bounded: bool, new: int
) -> tuple[list[tuple[dict[str, Any], FinishCode, str]], int]:
    """What an engine answers to requests of which each has its schema; how many it refuses."""
    model = demo_model()
    schemas = {i: a_schema(random.Random(i), bounded=bounded) for i in range(1, count + 1)}
    asked = [
        constrained.ask(i, JsonSchema(json.dumps(schema)), new=new, **constrained.RANDOM)
        for i, schema in schemas.items()
    ]
    client = constrained.serve(model, constrained.Client(asked), rows=25, slots=10_000)
    found = []
    for i, finish in client.finishes.items():
        # It says of every answer whether it conforms, and is right.
        assert client.satisfied[i] == (finish is FinishCode.EOS)
        found.append((schemas[i], finish, client.text(i)))
    return found, len(client.failures)


@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_answer_of_an_engine_to_a_bounded_schema_validates(count: int) -> None:
    found, refused = answers(count, bounded=True, new=380)
    assert refused < count / 10
    assert len(found) + refused == count
    for schema, finish, text in found:
        assert finish is FinishCode.EOS, (schema, text)
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


@pytest.mark.slow
def test_answers_to_unbounded_schemas_end_and_validate_where_they_end_by_themselves() -> None:
    found, refused = answers(300, bounded=False, new=150)
    assert len(found) + refused == 300
    ended = [(schema, text) for schema, finish, text in found if finish is FinishCode.EOS]
    assert len(ended) > 100
    for schema, text in ended:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_unbounded_schemas_hang_nothing(library: Guidance) -> None:
    ended = 0
    for seed in range(60):
        chance = random.Random(seed)
        schema = a_schema(chance, bounded=False)
        try:
            text = walk(library, schema, chance, 150)
        except (Refused, LimitReached):
            continue
        if text is not None:
            ended += 1
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert ended > 20
