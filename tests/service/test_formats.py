"""Formats that become patterns: what they allow is valid, whatever a schema says beside them."""

from __future__ import annotations

import datetime
import json
import re

import pytest

from tokenpod.core.constraints import JsonSchema
from tokenpod.engine.constraints.guidance import Guidance
from tokenpod.engine.constraints.library import LimitReached
from tokenpod.service.constraints.json_schema import check_schema

BYTES = Guidance([bytes([byte]) for byte in range(256)], [])


def checked(**schema):
    list(check_schema(schema))
    return schema


def allows(schema, value):
    matcher = BYTES.compile(JsonSchema(json.dumps(schema)))
    try:
        for byte in json.dumps(value).encode():
            matcher.take(byte)
    except LimitReached:
        return False
    return matcher.whole


def is_date(text):
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar():
    pattern = re.compile(checked(format="date")["pattern"])
    for year in (0, 1, 4, 96, 100, 400, 1900, 1999, 2000, 2023, 2024, 2100, 4000, 9996, 9999):
        for month in range(14):
            for day in (0, 1, 9, 27, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert bool(pattern.search(text)) == is_date(text), text


@pytest.mark.parametrize(
    ("name", "allowed", "forbidden"),
    [
        ("date", ["2024-02-29", "1999-12-31"], ["2023-02-29", "2024-2-9", " 2024-02-09", ""]),
        (
            "time",
            ["23:59:59Z", "00:00:00.25+14:00", "12:30:00-03:30"],
            ["23:59:60Z", "24:00:00Z", "12:30:00", "12:30:00+24:00", "12:30:00.Z"],
        ),
        (
            "date-time",
            ["2000-02-29T23:59:59z", "1963-06-19t08:30:06.283185Z"],
            ["1900-02-29T00:00:00Z", "1998-12-31T23:59:60Z", "1998-12-31 23:59:59Z", "1998-12-31"],
        ),
        (
            "hostname",
            ["a", "localhost", "a-b.c3.example", "a--b", f"{'a' * 63}.b", f"ab-{'c' * 60}"],
            ["", "-a", "a-", "a..b", "a.", "xn--x", "ab--c", "a" * 64, f"ab-{'c' * 61}", "a_b"],
        ),
    ],
)
def test_what_a_format_allows(name, allowed, forbidden):
    schema = checked(type="string", format=name)
    assert {text: allows(schema, text) for text in allowed} == dict.fromkeys(allowed, True)
    assert {text: allows(schema, text) for text in forbidden} == dict.fromkeys(forbidden, False)


def test_a_host_name_has_at_most_253_characters():
    schema = checked(type="string", format="hostname")
    label = "a" * 49 + "."
    assert allows(schema, label * 5 + "abc")
    assert not allows(schema, label * 5 + "abcd")


def test_patterns_and_lengths_beside_a_format_hold_too():
    schema = checked(type="string", format="date", pattern="^2024", allOf=[{"pattern": "9$"}])
    assert allows(schema, "2024-02-29")
    assert not allows(schema, "2024-02-28")
    assert not allows(schema, "2023-01-09")
    assert not allows(schema, "2024-02-39")
    assert not allows(checked(type="string", format="hostname", maxLength=3), "abcd")
    assert allows(checked(format="date"), 7), "other kinds have no format"
