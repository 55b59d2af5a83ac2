"""Where fixed texts stand in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def earliest(text: str, marks: Sequence[str]) -> tuple[int, int] | None:
    """Begin and end of the mark that begins first; None: there is none."""
    found = [(text.find(mark), len(mark)) for mark in marks]
    places = [(at, -size) for at, size in found if at >= 0]
    if not places:
        return None
    at, size = min(places)
    return at, at - size


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    most = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), most, -1):
            if text.endswith(mark[:size]):
                most = size
                break
    return most
