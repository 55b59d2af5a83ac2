"""Log lines: what a client has chosen can't pass for a field, or a line, of the server's."""

from __future__ import annotations

import json
import logging

import pytest

from tokenpod.service.telemetry.logs import JsonFormatter, TextFormatter


def line(formatter: logging.Formatter, **extra: object) -> str:
    record = logging.LogRecord("tokenpod", logging.INFO, "", 0, "generate", (), None)
    vars(record).update(extra)
    return formatter.format(record)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("abc-1", "abc-1"),
        (7, "7"),
        ([1], "[1]"),
        ("a finished=True", '"a finished=True"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("two\nlines", r'"two\nlines"'),
        ("", '""'),
    ],
)
def test_a_value_is_one_word(value: object, shown: str) -> None:
    text = line(TextFormatter(), request_id=value, finished=False)
    assert text.endswith(f"generate request_id={shown} finished=False")


def test_json_has_the_value_itself() -> None:
    entry = json.loads(line(JsonFormatter(), request_id="a finished=True", finished=False))
    assert entry["request_id"] == "a finished=True"
    assert entry["finished"] is False
