"""Files of prompts, and workload files: lengths that several engines can be measured with.

A workload file has a list of cases, or one case per key. A request is a pair of prompt and output
tokens, or an object of them with its arrival in units of 1 / rate. Other keys are ignored.

    {"token_low": 10, "token_high": 128000, "cases": [
        {"name": "chat", "seed": 22, "concurrency": 0, "requests": [[128, 256], ...]}]}
    {"d": {"rate_per_s": 2.5, "requests": [{"prompt": 225, "output": 46, "at": 0.0}, ...]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenpod_client.cli.bench.prompts import Text


@dataclass(frozen=True)
class Case:
    """One case of a workload file; None: the file does not say.

    `pairs` are prompt and output tokens of each request, `at` their arrivals in units of 1 / rate
    (requests/s), a `concurrency` of 0 is all at once, token ids are drawn from [low, high).
    """

    pairs: tuple[tuple[int, int], ...] = ()
    at: tuple[float, ...] = ()
    rate: float | None = None
    concurrency: int | None = None
    seed: int | None = None
    token_range: tuple[int, int] | None = None


def read_cases(text: str) -> dict[str, Case]:
    """The cases of a workload file by name, in the file's order.

    Raises ValueError that names the place in the file.
    """
    data = _json(text, "is not JSON")
    _need(isinstance(data, dict), "must be a JSON object")
    listed = data.get("cases")
    if listed is None:
        named = [(name, case) for name, case in data.items() if isinstance(case, dict)]
        rows = [(name, name, case) for name, case in named if "requests" in case]
    else:
        _need(isinstance(listed, list), "cases must be a list")
        rows = [(f"cases[{i}]", _name(f"cases[{i}]", case), case) for i, case in enumerate(listed)]
    _need(bool(rows), "has no cases")
    token_range = _token_range(data)
    return {name: _case(where, case, token_range) for where, name, case in rows}


def _name(where: str, case: Any) -> str:
    name = case.get("name") if isinstance(case, dict) else None
    _need(isinstance(name, str), f"{where} must be an object with a name")
    return str(name)


def _token_range(data: Mapping[str, Any]) -> tuple[int, int] | None:
    low = _whole(data.get("token_low"), "token_low", 0)
    high = _whole(data.get("token_high"), "token_high", 1)
    if low is None and high is None:
        return None
    _need(low is not None and high is not None, "token_low and token_high go together")
    _need(low < high, f"token_low is {low}: must be below token_high, {high}")
    return low, high


def _case(where: str, case: Mapping[str, Any], token_range: tuple[int, int] | None) -> Case:
    requests, rate = case.get("requests"), case.get("rate_per_s")
    if not isinstance(requests, list) or not requests:
        raise ValueError(f"{where}.requests must be a list that is not empty")
    rows = [_request(f"{where}.requests[{i}]", row) for i, row in enumerate(requests)]
    at = [time for _, _, time in rows if time is not None]
    some = 0 < len(at) < len(rows)
    _need(not some, f"{where}.requests: either every request has an at, or none")
    _need(at == sorted(at), f"{where}.requests: at must not decrease")
    fine = rate is None or (_is_number(rate) and rate > 0)
    _need(fine, f"{where}.rate_per_s is {rate!r}: must be a number above 0")
    return Case(
        pairs=tuple((prompt, output) for prompt, output, _ in rows),
        at=tuple(at),
        rate=rate,
        concurrency=_whole(case.get("concurrency"), f"{where}.concurrency", 0),
        seed=_whole(case.get("seed"), f"{where}.seed", 0),
        token_range=token_range,
    )


def _request(where: str, row: Any) -> tuple[Any, Any, Any]:
    """Prompt tokens, output tokens and arrival."""
    if isinstance(row, dict):
        prompt, output, at = row.get("prompt"), row.get("output"), row.get("at")
    else:
        pair = isinstance(row, list) and len(row) == 2
        _need(pair, f"{where} is {row!r}: write [prompt tokens, output tokens]")
        (prompt, output), at = row, None
    fine = all(type(tokens) is int and tokens >= 1 for tokens in (prompt, output))
    _need(fine, f"{where} is {row!r}: prompt and output are at least 1 token")
    _need(at is None or _is_number(at), f"{where}.at is {at!r}: must be a number from 0")
    return prompt, output, at


def read_texts(content: str, *, json_lines: bool) -> tuple[Text, ...]:
    """The prompts of a file, one per line as a text or as a JSON object.

    An object has a `prompt`, or `messages` with `role` and `content` each, and may have
    `max_new_tokens`. Empty lines are skipped. Raises ValueError that names the line.
    """
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    _need(bool(lines), "has no prompts")
    return tuple(_text(n, line) if json_lines else Text(line) for n, line in lines)


def _text(number: int, line: str) -> Text:
    row = _json(line, f"line {number} is not JSON")
    row = row if isinstance(row, dict) else {}
    tokens = row.get("max_new_tokens")
    fine = tokens is None or (type(tokens) is int and tokens > 0)
    _need(fine, f"line {number}: max_new_tokens is {tokens!r}: must be at least 1")
    if isinstance(row.get("prompt"), str):
        return Text(row["prompt"], max_new_tokens=tokens)
    try:
        messages = [(str(m["role"]), str(m["content"])) for m in row["messages"]]
    except (KeyError, TypeError):
        messages = []
    _need(bool(messages), f"line {number} has neither a prompt nor messages")
    return Text(messages=messages, max_new_tokens=tokens)


def _json(text: str, problem: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{problem}: {error}") from error


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _whole(value: Any, where: str, least: int) -> Any:
    fine = value is None or (type(value) is int and value >= least)
    _need(fine, f"{where} is {value!r}: must be a whole number from {least}")
    return value


def _need(fine: bool, problem: str) -> None:
    if not fine:
        raise ValueError(problem)
