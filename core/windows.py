"""How many slots layers with a window need, where these are apart from those of other layers.

A token is read there by the `window - 1` behind it alone, so a row never holds more of them than
its window, and what is taken back or shared beside it. Slots for all rows at once are set aside:
admission then has nothing to count in these layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Pages of a row that are filled in part: where its prefix parts from others', and at both ends.
PARTS = 4
_ENDS = 8


def longest(windows: Iterable[int | None]) -> int | None:
    """The longest of layers' windows; None: no layer has one."""
    return max((window for window in windows if window is not None), default=None)


@dataclass(frozen=True, slots=True)
class WholeTokens:
    """Layers with a window have the slots of all others."""

    #: Why, for the operator.
    why: str

    def __str__(self) -> str:
        """For the operator."""
        return f"whole tokens, {self.why}"


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """Slots of layers with a window."""

    #: Of the layers; of several windows, the longest.
    window: int
    slots: int
    #: Slots that are given, and given back, together.
    page: int = 16
    #: Positions of a row that may be taken back: drafts, and what was sampled without a mask.
    taken_back: int = 34

    def for_rows(self, rows: int, positions: int, prompt: int) -> WindowRoom:
        """The same with as many slots as rows need, whatever they run.

        Args:
            rows: sequences that can be live at once.
            positions: longest sequence, in tokens.
            prompt: prompt tokens of a step, which are held whole until it has run.
        """
        read = -(-self.window // self.page) - (-self.taken_back // self.page)
        each = min(read, -(-positions // self.page)) + PARTS + _ENDS
        pages = rows * each - (-prompt // self.page)
        return WindowRoom(self.window, pages * self.page, self.page, self.taken_back)

    def __str__(self) -> str:
        """For the operator."""
        return f"{self.slots} slots apart, for windows of up to {self.window} tokens"

    def taken(self, slot_bytes: int, fraction: float) -> int:
        """Bytes that are no longer free for other layers, of which `fraction` may be used too."""
        return int((self.slots + 1) * slot_bytes / fraction)
