"""Schemas each of whose texts needs another one within are refused, and where that begins."""

from __future__ import annotations

from typing import Any

import pytest

from tokenpod.service.constraints.json_schema import SchemaError, check_schema

ROOT = {"$ref": "#"}
NULL = {"type": "null"}
ROW = 2000


def needing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def row(last: int) -> dict[str, Any]:
    """Definitions of which each needs the next one, and the last one this."""
    steps = [*range(1, ROW), last]
    items = [{"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{i}"}} for i in steps]
    return {"$ref": "#/$defs/0", "$defs": dict(zip(map(str, range(ROW)), items, strict=True))}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (ROOT, "#/$ref"),
        (needing(a=ROOT), "#/properties/a/$ref"),
        ({"anyOf": [ROOT, needing(b=ROOT)]}, "#/anyOf/0/$ref"),
        ({"allOf": [NULL, ROOT]}, "#/allOf/1/$ref"),
        ({"type": "array", "items": ROOT, "minItems": 1}, "#/items/$ref"),
        ({"type": "array", "items": [NULL, ROOT], "minItems": 2}, "#/items/1/$ref"),
        ({"type": "array", "prefixItems": [ROOT], "minItems": 1}, "#/prefixItems/0/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": needing(b={"$ref": "#/$defs/a"})}}, "#/$defs/a"),
        (row(7), "#/$defs/"),
        (needing(a={"$ref": "#/$defs/b"}) | {"$defs": {"b": {"type": []}}}, "#/properties/a/$ref"),
    ],
)
def test_a_schema_without_an_end_is_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(SchemaError, match="no text has an end") as refused:
        list(check_schema(schema))
    assert f"at {place}" in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": ROOT}},
        {"type": "array", "items": ROOT},
        {"type": "array", "prefixItems": [NULL, ROOT], "minItems": 1},
        {"anyOf": [ROOT, NULL]},
        {"properties": {"a": ROOT}, "required": ["a"]},
        {"type": ["array", "null"], "items": ROOT, "minItems": 1},
        needing(a={"anyOf": [NULL, ROOT]}),
        {**needing(a=ROOT), "enum": [1]},
        needing(a={"$ref": "#/properties/b"}) | {"$defs": {"unused": {"$ref": "#/$defs/unused"}}},
        row(ROW),
    ],
)
def test_others_are_not(schema: dict[str, Any]) -> None:
    list(check_schema(schema))


@pytest.mark.parametrize("index", ["²", "٣", "00", "-1", "1", "9" * 5000])
def test_an_index_that_names_nothing_is_left_to_the_compiler(index: str) -> None:
    list(check_schema({"anyOf": [NULL], "$ref": f"#/anyOf/{index}"}))
