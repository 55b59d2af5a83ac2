"""Workload files: lists of lengths that several engines can be measured with.

Two forms are read. The first has a list of cases and says which token ids to draw from; the second
has a case a key:

    {"token_low": 10, "token_high": 128000, "cases": [
        {"name": "chat", "seed": 22, "concurrency": 0, "requests": [[128, 256], ...]}]}
    {"d": {"rate_per_s": 2.5, "requests": [{"prompt": 225, "output": 46, "at": 0.0}, ...]}}

A request is a pair of prompt and output tokens, or an object of them with the time of its arrival
in units of 1 / rate. Other keys are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class WorkloadError(ValueError):
    """A file that is not what it should be; the text names the place."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case of a workload file.

    Args:
        name: as the file has it.
        lengths: prompt and output tokens of each request.
        at: arrivals in units of 1 / rate, or () where the file has none.
        rate: requests a second, or None.
        concurrency: requests at a time; 0: all at once; None: the file does not say.
        seed: of the token ids, or None.
        token_low, token_high: token ids are drawn from [low, high); None: the file does not say.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    at: tuple[float, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    seed: int | None = None
    token_low: int | None = None
    token_high: int | None = None


def read_cases(text: str) -> dict[str, Case]:
    """The cases of a workload file by name, in the file's order. Raises WorkloadError."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise WorkloadError(f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise WorkloadError("must be a JSON object")
    listed = data.get("cases")
    if listed is None:
        named = [(name, value) for name, value in data.items() if isinstance(value, dict)]
        rows = [(name, name, case) for name, case in named if "requests" in case]
    elif isinstance(listed, list):
        rows = [(f"cases[{i}]", _name(i, case), case) for i, case in enumerate(listed)]
    else:
        raise WorkloadError("cases must be a list")
    if not rows:
        raise WorkloadError("has no cases")
    low, high = _token_range(data)
    return {name: _case(where, name, case, low, high) for where, name, case in rows}


def _name(index: int, case: object) -> str:
    if not isinstance(case, dict) or not isinstance(case.get("name"), str):
        raise WorkloadError(f"cases[{index}] must be an object with a name")
    return str(case["name"])


def _token_range(data: Mapping[str, Any]) -> tuple[int | None, int | None]:
    low = _whole(data, "token_low", "token_low", 0)
    high = _whole(data, "token_high", "token_high", 1)
    if (low is None) != (high is None):
        raise WorkloadError("token_low and token_high go together")
    if low is not None and high is not None and low >= high:
        raise WorkloadError(f"token_low is {low}: must be below token_high, {high}")
    return low, high


def _case(
    where: str, name: str, case: Mapping[str, Any], low: int | None, high: int | None
) -> Case:
    requests = case.get("requests")
    if not isinstance(requests, list) or not requests:
        raise WorkloadError(f"{where}.requests must be a list that is not empty")
    rows = [_request(f"{where}.requests[{i}]", row) for i, row in enumerate(requests)]
    at = [time for _, _, time in rows if time is not None]
    if len(at) not in (0, len(rows)):
        raise WorkloadError(f"{where}.requests: either every request has an at, or none")
    if at != sorted(at):
        raise WorkloadError(f"{where}.requests: at must not decrease")
    return Case(
        name,
        tuple((prompt, output) for prompt, output, _ in rows),
        tuple(at),
        _rate(case, f"{where}.rate_per_s"),
        _whole(case, "concurrency", f"{where}.concurrency", 0),
        _whole(case, "seed", f"{where}.seed", 0),
        low,
        high,
    )


def _request(where: str, row: Any) -> tuple[int, int, float | None]:
    prompt: Any
    output: Any
    at: Any = None
    if isinstance(row, dict):
        prompt, output, at = row.get("prompt"), row.get("output"), row.get("at")
    elif isinstance(row, list) and len(row) == 2:
        prompt, output = row
    else:
        raise WorkloadError(f"{where} is {row!r}: write [prompt tokens, output tokens]")
    if not (_is_whole(prompt, 1) and _is_whole(output, 1)):
        raise WorkloadError(f"{where} is {row!r}: prompt and output are at least 1 token")
    if at is not None and not _is_number(at, 0.0):
        raise WorkloadError(f"{where}.at is {at!r}: must be a number from 0")
    return prompt, output, at


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: Any, least: float) -> bool:
    """Whether it is one, and finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value < math.inf


def _whole(data: Mapping[str, Any], key: str, where: str, least: int) -> int | None:
    value: int | None = data.get(key)
    if value is not None and not _is_whole(value, least):
        raise WorkloadError(f"{where} is {value!r}: must be a whole number from {least}")
    return value


def _rate(data: Mapping[str, Any], where: str) -> float | None:
    value: float | None = data.get("rate_per_s")
    if value is not None and not (_is_number(value, 0.0) and value > 0):
        raise WorkloadError(f"{where} is {value!r}: must be a number above 0")
    return value
