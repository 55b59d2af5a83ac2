"""Samples that wait for the prompt of their request's first one, each with the promise of a row."""

from __future__ import annotations

from collections.abc import Iterator

from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence


class Siblings:
    """Who waits for whose prompt.

    Args:
        rows: in which each of them will run; the queue has promised these.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        #: By the first one's id.
        self._waiting: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for waiting in self._waiting.values() for sequence in waiting)

    @property
    def by_first(self) -> list[tuple[int, list[Sequence]]]:
        """The first one's id, and who waits for it."""
        return [*self._waiting.items()]

    def of(self, first: Sequence) -> list[Sequence]:
        """Those that wait for the prompt of `first`."""
        return self._waiting.get(first.id, [])

    def add(self, first: Sequence, siblings: list[Sequence]) -> None:
        """Let these wait for the prompt of `first`."""
        if siblings:
            self._waiting[first.id] = siblings

    def take(self, first: Sequence) -> list[Sequence]:
        """Those that wait for the prompt of `first`, which wait no longer: rows are theirs now."""
        siblings = self._waiting.pop(first.id, [])
        self._rows.promise(-len(siblings))
        return siblings

    def remove(self, sequence: Sequence) -> None:
        """One that may wait here has ended."""
        for first, siblings in self._waiting.items():
            if sequence in siblings:
                siblings.remove(sequence)
                self._rows.promise(-1)
                if not siblings:
                    del self._waiting[first]
                return
