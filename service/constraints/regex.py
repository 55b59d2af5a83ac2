"""Regular expressions of clients: what automata can't do is refused by name and place."""

from __future__ import annotations

import re

_LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}
_BACK = re.compile(r"\\[1-9]|\\k[<{']|\(\?P=")
_BORDERS = ("\\b", "\\B")


def problem_of(pattern: str) -> str:
    """What of a pattern is not supported, and where; empty: nothing that has a name here.

    A class of characters is skipped: `[\\b]` is a backspace.
    """
    at, inside = 0, False
    while at < len(pattern):
        two = pattern[at : at + 2]
        if inside:
            inside = pattern[at] != "]"
        elif pattern[at] == "[":
            inside = True
            # A bracket that comes first, also after ^, is a character.
            at += 1 + pattern.startswith("^", at + 1)
            if pattern.startswith("]", at):
                at += 1
            continue
        elif two in _BORDERS:
            return f"{two} at character {at}: borders of words are not supported"
        elif _BACK.match(pattern, at):
            return f"{pattern[at : at + 2]} at character {at}: back references are not supported"
        elif found := next((look for look in _LOOKS if pattern.startswith(look, at)), None):
            return f"{found} at character {at}: {_LOOKS[found]} is not supported"
        at += 2 if two.startswith("\\") else 1
    return ""
