"""Regular expressions of clients: what automata can't do is refused by name and place."""

from __future__ import annotations

import re

_LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}
#: One search, and not a loop over characters: a pattern may have 256 kB.
_FOUND = re.compile(
    # A class, in which a bracket that comes first, also after ^, is a character.
    r"\[\^?\]?(?:\\.|[^\]\\])*\]?"
    r"|(?P<border>\\[bB])|(?P<back>\\[1-9]|\\k[<{']|\(\?P=)|(?P<look>\(\?<?[=!])"
    r"|\\.",
    re.DOTALL,
)


def problem_of(pattern: str) -> str:
    """What of a pattern is not supported, and where; empty: nothing that has a name here.

    A class of characters is skipped: `[\\b]` is a backspace.
    """
    for found in _FOUND.finditer(pattern):
        place = f"{found[0][:2]} at character {found.start()}"
        match found.lastgroup:
            case "border":
                return f"{place}: borders of words are not supported"
            case "back":
                return f"{place}: back references are not supported"
            case "look":
                look = f"{found[0]} at character {found.start()}"
                return f"{look}: {_LOOKS[found[0]]} is not supported"
    return ""
