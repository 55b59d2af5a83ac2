"""Finds processes that have fallen silent: stopped ones, hung ones, half-open connections.

Time in which the listener itself was stopped, or had no CPU, does not count: what came meanwhile
has not been read yet. So `Silence` counts its own ticks.
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
    """Counts ticks without a heartbeat, for each name. Any thread may call it."""

    def __init__(self) -> None:
        self._ticks: dict[Name, int] = {}
        self._lock = threading.Lock()

    def watch(self, name: Name) -> None:
        """Expect heartbeats of `name` from now on."""
        with self._lock:
            self._ticks[name] = 0

    def heard(self, name: Name) -> None:
        """A heartbeat of `name` has come; ignored if it is not watched."""
        with self._lock:
            if name in self._ticks:
                self._ticks[name] = 0

    def forgive(self) -> None:
        """Start counting again for all names."""
        with self._lock:
            self._ticks = dict.fromkeys(self._ticks, 0)

    def forget(self, name: Name) -> None:
        """Expect no more heartbeats of `name`."""
        with self._lock:
            self._ticks.pop(name, None)

    def tick(self, patience: float) -> list[Name]:
        """Count one tick. Returns the names without a heartbeat for `patience` seconds."""
        most = max(round(patience / BEAT_SECONDS), 1)
        with self._lock:
            for name in self._ticks:
                self._ticks[name] += 1
            return [name for name, ticks in self._ticks.items() if ticks > most]
