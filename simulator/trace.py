"""A load as a list of requests, and the CSV files that hold one.

Three formats, told apart by the names in the first line:

- ours: `arrival_s,prompt_tokens,output_tokens[,max_new_tokens,priority,prefix_id,prefix_tokens]`;
- Azure's published traces: `TIMESTAMP,ContextTokens,GeneratedTokens`;
- BurstGPT: `Timestamp` in seconds, `Request tokens`, `Response tokens` among others; rows with 0
  response tokens are failures, left out and counted, as are Azure's with 0 generated ones.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

#: Bytes of a file, and requests of it, at most.
MOST_BYTES = 1 << 30
MOST_REQUESTS = 5_000_000
_MOST_TOKENS = 1 << 30


class TraceError(Exception):
    """A file is no trace; the text is one line that names the file and its line."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Args:
        at: seconds from the beginning.
        prompt_tokens: of its prompt.
        output_tokens: it ends after so many, which nobody knows beforehand.
        max_new_tokens: what it asks for at most; None: the simulation says.
        priority: higher first.
        prefix_id: requests with the same one begin alike.
        prefix_tokens: so many tokens of the prompt.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    max_new_tokens: int | None = None
    priority: int = 0
    prefix_id: int = 0
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file by their arrival, and rows that were left out."""

    arrivals: list[Arrival]
    left_out: int = 0


def read_trace(path: Path) -> Trace:
    """Read a CSV file. Raises TraceError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise TraceError(f"{path} has more than {MOST_BYTES} bytes")
        with path.open(newline="", encoding="utf-8-sig") as file:
            return _read(path, csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        text = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise TraceError(f"{path} can't be read: {text}") from None


def _read(path: Path, rows: csv.DictReader[str]) -> Trace:
    names = set(rows.fieldnames or ())
    row_of = next((of for needed, of in _FORMATS.items() if names.issuperset(needed)), None)
    if row_of is None:
        raise TraceError(
            f"{path} has columns {', '.join(sorted(names))[:200] or 'without names'}; it must have"
            f" {' or '.join(','.join(each) for each in _FORMATS)}"
        )
    found: list[Arrival] = []
    left_out = 0
    for row in rows:
        try:
            arrival = row_of(row)
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {rows.line_num}: {error}") from None
        if arrival is None:
            left_out += 1
        else:
            found.append(arrival)
        if len(found) > MOST_REQUESTS:
            raise TraceError(f"{path} has more than {MOST_REQUESTS} requests")
    if not found:
        raise TraceError(f"{path} has no requests")
    return Trace(from_zero(found), left_out)


def from_zero(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """In the order of arrival, the first one at 0."""
    ordered = sorted(arrivals, key=lambda each: each.at)
    first = ordered[0].at
    return [_moved(each, each.at - first) for each in ordered]


def at_rate(arrivals: list[Arrival], speed: float) -> list[Arrival]:
    """The same requests, `speed` times as fast."""
    return [_moved(each, each.at / speed) for each in arrivals]


def _moved(arrival: Arrival, at: float) -> Arrival:
    return Arrival(
        at,
        arrival.prompt_tokens,
        arrival.output_tokens,
        arrival.max_new_tokens,
        arrival.priority,
        arrival.prefix_id,
        arrival.prefix_tokens,
    )


def _ours(row: Mapping[str, str]) -> Arrival:
    prompt = _count(row, "prompt_tokens", 1)
    prefix = _count(row, "prefix_tokens", 0, "0")
    if prefix > prompt:
        raise ValueError(f"prefix_tokens is {prefix}: it must be at most prompt_tokens, {prompt}")
    asked = row.get("max_new_tokens")
    return Arrival(
        at=_seconds(row["arrival_s"], "arrival_s"),
        prompt_tokens=prompt,
        output_tokens=_count(row, "output_tokens", 1),
        max_new_tokens=_count(row, "max_new_tokens", 1) if asked else None,
        priority=int(row.get("priority") or 0),
        prefix_id=_count(row, "prefix_id", 0, "0"),
        prefix_tokens=prefix,
    )


def _azure(row: Mapping[str, str]) -> Arrival | None:
    if not _count(row, "GeneratedTokens", 0):
        return None
    # Seven digits of a second are one more than a datetime has.
    text, _, fraction = row["TIMESTAMP"].strip().removesuffix("Z").partition(".")
    digits = fraction.partition("+")[0]
    whole = datetime.fromisoformat(text)
    seconds = (whole - datetime(1970, 1, 1, tzinfo=whole.tzinfo)).total_seconds()
    return Arrival(
        at=seconds + (float(f"0.{digits}") if digits else 0.0),
        prompt_tokens=_count(row, "ContextTokens", 1),
        output_tokens=_count(row, "GeneratedTokens", 1),
    )


def _burst(row: Mapping[str, str]) -> Arrival | None:
    if not _count(row, "Response tokens", 0):
        return None
    return Arrival(
        at=_seconds(row["Timestamp"], "Timestamp"),
        prompt_tokens=_count(row, "Request tokens", 1),
        output_tokens=_count(row, "Response tokens", 1),
    )


#: By the columns that a file must have.
_FORMATS: dict[tuple[str, ...], Callable[[Mapping[str, str]], Arrival | None]] = {
    ("arrival_s", "prompt_tokens", "output_tokens"): _ours,
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burst,
}


def _count(row: Mapping[str, str], name: str, least: int, default: str = "") -> int:
    text = row.get(name) or default
    try:
        value = int(float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {text!r:.40}: it must be a number") from None
    if not least <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} is {value}: it must be from {least} to {_MOST_TOKENS}")
    return value


def _seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r:.40}: it must be seconds") from None
    if not 0 <= value < 1e12:
        raise ValueError(f"{name} is {value}: it must be at least 0")
    return value
