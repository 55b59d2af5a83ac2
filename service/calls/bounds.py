"""Bounds on single values: each names the field, its value and the limit."""

from __future__ import annotations

import math
from typing import NoReturn

from tokenpod.service.calls.errors import InvalidArgument


def between(field: str, value: float, low: float, high: float) -> None:
    """A finite number from `low` to `high`, both included."""
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"from {low} to {high}" if math.isfinite(high) else f"finite and at least {low}"
        refuse(field, value, f"must be {bounds}")


def at_most(field: str, value: int, most: int, flag: str | None) -> None:
    """At most so much. `flag`: where an operator allows more."""
    if value > most:
        source = f" ({flag})" if flag else ""
        raise InvalidArgument(field, f"is {value}; this server allows at most {most}{source}")


def few_entries(field: str, count: int, most: int, flag: str | None = None) -> None:
    """At most so many. `flag`: where an operator allows more."""
    if count > most:
        source = f" ({flag})" if flag else ""
        raise InvalidArgument(field, f"has {count} entries; this server allows {most}{source}")


def refuse(field: str, value: object, problem: str) -> NoReturn:
    """Raise InvalidArgument: what a field is, and what is wrong with it."""
    shown = f"{value:g}" if isinstance(value, float) else value
    raise InvalidArgument(field, f"is {shown}; {problem}")
