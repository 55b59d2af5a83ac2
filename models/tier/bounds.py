"""Bounds on what a config.json may say to transformers' classes, which trust it.

Our families check each field that they read. Of other classes we know no fields, but what a number
can do: be a length, which costs nothing before weights are there, or say how often something is
made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenpod.models.tier.errors import NotServed

MOST_NUMBER = 1 << 31
MOST_ENTRIES, MOST_DEPTH = 1 << 16, 16
#: How many layers there are, or modules of another kind.
MOST_LAYERS, MOST_MODULES = 1 << 10, 1 << 15
#: To so many tokens a class may fill up a text, at most.
MOST_CHUNK = 1 << 22

#: By what their names have.
_LAYERS = re.compile(r"layer|block|depth|stage|stack")
_MODULES = re.compile(r"expert|codebook|heads?$|^n_|^num_")
_LENGTHS = re.compile(
    r"size|dim|width|_ids?$|window|length|position|rank|ctx|embd|state|inner|theta"
)
_CHUNKS = re.compile(r"chunk|kernel|bucket|stride")


def check_bounds(values: Mapping[str, Any], at: str = "") -> None:
    """Raise NotServed, with the field's name, for what no model has."""
    for name, value in values.items():
        _check(f"{at}{name}", str(name), value, at.count(".") + 1)


def _check(place: str, name: str, value: Any, depth: int) -> None:
    if isinstance(value, Mapping | list):
        if depth > MOST_DEPTH:
            raise NotServed(f"config.json's {place[:80]} is nested more than {MOST_DEPTH} deep")
        if len(value) > MOST_ENTRIES:
            raise NotServed(f"config.json's {place[:80]} has {len(value):,} entries")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check(f"{place}.{key}", str(key), inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(place, name, inner, depth + 1)
    elif isinstance(value, int) and abs(value) > (most := _most(name)):
        raise NotServed(f"config.json's {place[:80]} is {_shown(value)}; at most {most:,} is read")


def _most(name: str) -> int:
    if _CHUNKS.search(name):
        return MOST_CHUNK
    if _LENGTHS.search(name):
        return MOST_NUMBER
    if _LAYERS.search(name):
        return MOST_LAYERS
    return MOST_MODULES if _MODULES.search(name) else MOST_NUMBER


def _shown(value: int) -> str:
    digits = str(value)
    return digits if len(digits) <= 24 else f"{digits[:20]}..."
