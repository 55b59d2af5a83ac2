"""Log lines: a client's text can't pass for a field or a line of ours, and who logs never waits."""

from __future__ import annotations

import json
import logging
import os
import re
import select
from pathlib import Path

import pytest

from tokenpod.service.telemetry.logs import (
    JsonFormatter,
    LineWriter,
    TextFormatter,
    plain_record,
)


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


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_plain_record_is_written_as_loggings_own(formatter: logging.Formatter) -> None:
    plain = plain_record("tokenpod", logging.INFO, "generate", {"seconds": 0.5, "rpc": "a b"})
    own = logging.LogRecord("tokenpod", logging.INFO, "", 0, "generate", (), None)
    vars(own).update(seconds=0.5, rpc="a b", created=plain.created, msecs=plain.msecs)
    assert formatter.format(plain) == formatter.format(own)


def logger_to(descriptor: int, most: int = 8192) -> tuple[logging.Logger, LineWriter]:
    """A logger of its own, whose lines go to a file."""
    writer = LineWriter(descriptor, TextFormatter(), most)
    logger = logging.Logger("tokenpod.test")
    logger.addHandler(writer)
    return logger, writer


def test_lines_come_in_their_order_and_the_last_one_before_the_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        logger, writer = logger_to(file.fileno())
        for number in range(1000):
            logger.info("line %d", number, extra={"number": number})
        writer.tell("a table\nof two lines")
        writer.flush()
    *lines, table, rest = (tmp_path / "log").read_text().splitlines()
    assert [line.rpartition("=")[2] for line in lines] == [str(number) for number in range(1000)]
    assert (table, rest) == ("a table", "of two lines")


def test_a_reader_that_has_stopped_keeps_nobody_who_logs(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    logger, _ = logger_to(writing, most=100)
    # Nobody reads: the pipe takes 64 KiB, the queue 100 lines, and all else is dropped.
    for number in range(5000):
        logger.info("x" * 200, extra={"number": number})
    found, kept, told = b"", 0, 0
    while kept + told < 5000:
        assert select.select([reading], [], [], 60)[0], "no line says what was dropped"
        found += os.read(reading, 1 << 16)
        kept = found.count(b"number=")
        told = sum(map(int, re.findall(rb"log lines were dropped.* lines=(\d+)\n", found)))
    assert kept + told == 5000
    assert kept < 1000
    os.close(reading)


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        logger, writer = logger_to(file.fileno())
        for _ in range(100):
            logger.info("a line")
        writer.flush()
        # The thread has tried each line, and would write again.
        assert (writer.unwritten, writer.waiting) == (100, 0)


def test_a_traceback_is_kept_as_text_and_not_as_frames(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        logger, writer = logger_to(file.fileno())
        try:
            raise ValueError("broken")
        except ValueError as error:
            logger.exception("fault")
            error.args = ("changed later",)
        writer.flush()
    assert "ValueError: broken" in (tmp_path / "log").read_text()
