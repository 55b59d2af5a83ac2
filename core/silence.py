"""Who has not been heard for too long: a stopped process, a connection that is only half there.

Silence is counted in the listener's own ticks, not by the clock: a listener that was itself
stopped, or starved, has not been listening, and blames nobody for that time.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

#: Seconds between two heartbeats, and between two ticks.
BEAT_SECONDS = 0.2
#: Seconds without a heartbeat after which a rank counts as lost: while it serves, and while it
#: loads, when libraries and compilers may hold up a whole process.
PATIENCE_SECONDS = 1.4
LOADING_PATIENCE_SECONDS = 20.0

Name = TypeVar("Name", bound=Hashable)


class Silence(Generic[Name]):
    """Counts ticks without a word. Any thread may call it."""

    def __init__(self) -> None:
        self._ticks: dict[Name, int] = {}
        self._lock = threading.Lock()

    def watch(self, name: Name) -> None:
        """Listen for `name` from now on."""
        with self._lock:
            self._ticks[name] = 0

    def heard(self, name: Name) -> None:
        """A word of `name`; of one who is not watched it means nothing."""
        with self._lock:
            if name in self._ticks:
                self._ticks[name] = 0

    def forgive(self) -> None:
        """Count from anew for all: patience is about to end."""
        with self._lock:
            self._ticks = dict.fromkeys(self._ticks, 0)

    def forget(self, name: Name) -> None:
        """Listen no more."""
        with self._lock:
            self._ticks.pop(name, None)

    def tick(self, patience: float) -> list[Name]:
        """One beat has passed; who has been silent for `patience` seconds."""
        most = max(round(patience / BEAT_SECONDS), 1)
        with self._lock:
            for name in self._ticks:
                self._ticks[name] += 1
            return [name for name, ticks in self._ticks.items() if ticks > most]
