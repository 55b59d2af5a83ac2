"""Keywords of JSON schemas: those that are served are documented, others are refused by name."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tokenpod.core.constraints import Constraint, Grammar, JsonSchema
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import Refused
from tokenpod.service.constraints.asked import read_tags
from tokenpod.service.constraints.json_schema import (
    MOST_SCHEMAS,
    SUPPORTED,
    SchemaError,
    check_schema,
    read_schema,
)

DOCS = Path(__file__).parents[2] / "docs" / "constraints.md"
#: What drafts 6 to 2020-12 have beyond the keywords that are served.
OTHERS: dict[str, Any] = {
    "not": {},
    "if": {},
    "contains": {},
    "minContains": 1,
    "propertyNames": {},
    "uniqueItems": True,
    "dependencies": {},
    "dependentRequired": {},
    "dependentSchemas": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
}


def test_the_keywords_that_are_served_are_those_that_are_documented() -> None:
    section = DOCS.read_text().split("## JSON schemas")[1].split("\n\n")
    (table,) = [part for part in section if part.startswith("| keywords")]
    documented = {*re.findall(r"`([$a-zA-Z]+)`", table)}
    # What `$id` and `$schema` say is nothing of what is valid; draft 4 calls the former `id`.
    assert SUPPORTED - {"id"} <= documented


@pytest.mark.parametrize("keyword", OTHERS)
def test_another_keyword_is_refused_by_its_name_and_place(keyword: str) -> None:
    schema = {"properties": {"a/b": {keyword: OTHERS[keyword]}}}
    with pytest.raises(SchemaError) as refused:
        list(check_schema(schema))
    place = f"#/properties/a~1b/{keyword}"
    assert str(refused.value) == f"the keyword {keyword!r} is not supported, at {place}"


@pytest.mark.parametrize(
    "draft",
    [
        "draft-04/schema#",
        "draft-06/schema#",
        "draft-07/schema#",
        "draft/2019-09/schema",
        "draft/2020-12/schema",
    ],
)
def test_drafts_are_told_apart_by_their_names(draft: str) -> None:
    list(check_schema({"$schema": f"http://json-schema.org/{draft}"}))
    with pytest.raises(SchemaError, match="no draft that is known"):
        list(check_schema({"$schema": "http://json-schema.org/draft-03/schema#"}))


def test_schemas_within_schemas_are_counted() -> None:
    def check(count: int) -> None:
        for _ in check_schema({"anyOf": [{}] * (count - 1)}):
            pass

    check(MOST_SCHEMAS)
    with pytest.raises(SchemaError, match=f"more than {MOST_SCHEMAS} schemas"):
        check(MOST_SCHEMAS + 1)


@pytest.mark.parametrize("value", [[], {}, [["date"]], None, 5, True])
def test_a_format_that_is_no_text_is_not_supported(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"the format .* is not supported, at #/items/format"):
        list(check_schema({"items": {"format": value}}))


@pytest.mark.parametrize("value", [{}, "ab", 5, None, True, [1], [["a"]]])
def test_what_is_required_is_a_list_of_names(value: Any) -> None:
    with pytest.raises(SchemaError, match="it is a list of names, at #/required"):
        list(check_schema({"required": value}))


@pytest.mark.parametrize("text", [r'{"\ud800": 1}', r'{"enum": ["a", {"b": ["\uDFFF"]}]}'])
def test_half_of_a_character_is_refused(text: str) -> None:
    """JSON can write it, but no message can hold it: neither an answer nor one to the engine."""
    with pytest.raises(SchemaError, match="half of a character"):
        read_schema(text)
    with pytest.raises(SchemaError, match="half of a character"):
        read_tags(text)
    assert read_schema(r'{"const": "\ud83d\ude00"}') == {"const": "\U0001f600"}


def test_nothing_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        remote = {"$ref": f"http://127.0.0.1:{listening.getsockname()[1]}/schema"}
        with pytest.raises(SchemaError, match="only references within the schema"):
            list(check_schema(dict(remote)))
        # Nor by the library, which a grammar's own `%json` reaches.
        library = Guidance([bytes([byte]) for byte in range(256)], [])
        within: list[Constraint] = [
            JsonSchema(json.dumps(remote)),
            Grammar(f"start: %json {json.dumps(remote)}"),
        ]
        for constraint in within:
            with pytest.raises(Refused):
                library.compile(constraint)
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
