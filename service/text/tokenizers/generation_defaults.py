"""What a model's generation_config.json says of how its tokens are to be chosen."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenpod.core.sampling import TABLE
from tokenpod.service.text.tokenizers.files import read_object

log = logging.getLogger("tokenpod")

#: Fields that the file and ours both have; without `do_sample` only the last one means anything.
_DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_ALWAYS = ("repetition_penalty",)
_MOST_TOP_K = 2**32 - 1


def read_defaults(folder: Path) -> dict[str, Any]:
    """Fields of `Sampling` by their names, as far as they are within our bounds.

    As Hugging Face's libraries read the file, temperature and cuts count where `do_sample` is true.
    Raises TokenizerError for a file that can't be read.
    """
    config = read_object(folder / "generation_config.json")
    drawn = config.get("do_sample") is True and config.get("temperature") != 0
    wanted = (*_DRAWN, *_ALWAYS) if drawn else _ALWAYS
    found = dict(_fields(config, wanted))
    return {"do_sample": True, **found} if drawn else found


def _fields(config: Mapping[str, Any], wanted: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    knobs = {column.name: column for column in TABLE.columns}
    for name in wanted:
        value, column = config.get(name), knobs[name]
        if value is None or value == column.neutral:
            continue
        if not _is_number(value) or not _within(value, column.knob.low, column.knob.high):
            log.warning(
                "a default of generation_config.json is left out: it is not within our bounds",
                extra={"field": name, "value": str(value)[:100]},
            )
            continue
        yield name, column.kind(value)


def _is_number(value: object) -> bool:
    # Whole numbers of a file may be larger than any float.
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _within(value: float, low: float | None, high: float) -> bool:
    # A knob without bounds is a number of tokens.
    return 0 < value <= (min(high, _MOST_TOP_K) if low is None else high)


def with_defaults(given: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a request's `Sampling`, with those that it leaves open as the model has them.

    A request that asks for the most likely token each time gets nothing that is for drawing.
    """
    greedy = given.get("do_sample") is False or given.get("temperature") == 0
    used = {name: defaults[name] for name in _ALWAYS if name in defaults} if greedy else defaults
    return {**used, **given}
