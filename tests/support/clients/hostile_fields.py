"""Hostile values for every field of a JSON file, and what reading it may cost."""

from __future__ import annotations

import copy
import json
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: list[Any] = [
    *(1 << 40, 1 << 31, (1 << 31) - 1, 1 << 20, 10**400, -(10**400), -1, 0, 1, 2, 3),
    *(1e308, 1e-308, 0.5, float("inf"), "x", "", [], {}, nested(500), [1 << 40] * 3, ["x"] * 3),
    *(True, None, {"rope_type": "yarn", "factor": 1e308}, {"rope_type": "llama3", "factor": 0}),
]
#: Seconds of a processor that one config may take, and memory that all of a test may.
SECONDS, BYTES = 2, 96 << 20


def fields_of(values: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from fields_of(value, (*at, name))


def with_field(config: dict[str, Any], field: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    inner = changed
    for name in field[:-1]:
        inner = inner[name]
    inner[field[-1]] = value
    return changed


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fail, and end, what takes too long."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"{what} takes more than {SECONDS} s of a processor")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attack(
    config: dict[str, Any],
    path: Path,
    read: Callable[[Path], object],
    refusal: type[Exception],
    each: int = len(HOSTILE),
) -> int:
    """Read folders whose file at `path` has hostile values in each field, `each` of them.

    How many were refused; with another error than `refusal`, or one of several lines, it fails.
    """
    refused, most = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for field in fields_of(config):
        first = zlib.crc32(repr((config.get("architectures"), field)).encode())
        for i in range(each):
            value = HOSTILE[(first + i) % len(HOSTILE)]
            what = f"{'.'.join(field)} = {repr(value)[:40]}"
            path.write_text(json.dumps(with_field(config, field, value)))
            said = ""
            with bounded(what):
                try:
                    read(path.parent)
                except refusal as error:
                    said = str(error)
            refused += said != ""
            assert "\n" not in said, what
            assert len(said) < 2000, what
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
    assert grown << 10 < BYTES
    return refused
