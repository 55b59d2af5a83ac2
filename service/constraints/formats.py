"""Formats of strings for which a pattern is exact, where the library's own lets more through.

The library allows 29 February in any year, a 61st second at any time, and host names whose encoded
labels encode nothing. These patterns allow no leap second, no year 0, and no encoded label.
"""

from __future__ import annotations

from typing import Any

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
#: Up to 63 letters, digits and hyphens, none at either end, not both the third and the fourth.
_LABEL = (
    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,2}[A-Za-z0-9]"
    "|[A-Za-z0-9-](?:[A-Za-z0-9][A-Za-z0-9-]|-[A-Za-z0-9])[A-Za-z0-9-]{0,58}[A-Za-z0-9])?"
)
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
}
_MOST_OF_HOSTNAME = 253


def spell_format(schema: dict[str, Any]) -> None:
    """Put a pattern in the place of a schema's format, if there is one for it."""
    name = schema.get("format")
    pattern = _PATTERNS.get(name) if isinstance(name, str) else None
    others = schema.get("allOf", [])
    if pattern is None or not isinstance(others, list):
        return
    del schema["format"]
    told: dict[str, Any] = {"pattern": f"^(?:{pattern})$"}
    if name == "hostname":
        told["maxLength"] = _MOST_OF_HOSTNAME
    if told.keys().isdisjoint(schema):
        schema |= told
    else:
        schema["allOf"] = [*others, told]
