"""Runs of adjacent free slots, by where they start and by how long they are."""

from __future__ import annotations

from bisect import bisect_left, insort

#: Of so many runs each is looked up to be forgotten; of more, the rest is sorted anew.
_FEW = 8


class FreeRuns:
    """Runs that don't touch one another.

    Args:
        total: slots 0 to total - 1 are free at first.
    """

    def __init__(self, total: int) -> None:
        self._starts = [0] if total else []
        self._length = {0: total} if total else {}
        #: (length, start), rising.
        self._by_length = [(total, 0)] if total else []

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return self._by_length[-1][0] if self._by_length else 0

    def items(self) -> list[tuple[int, int]]:
        """(start, length) of each run."""
        return [*self._length.items()]

    def begins_at(self, slot: int) -> bool:
        """Whether a run starts there."""
        return slot in self._length

    def fit(self, n: int, room: int) -> int | None:
        """Start of the shortest run that holds both, else of the longest one if `n` fit."""
        if self.longest < n:
            return None
        at = bisect_left(self._by_length, (n + room, 0))
        return self._by_length[min(at, len(self._by_length) - 1)][1]

    def take_longest(self, most: int) -> tuple[int, int]:
        """Take up to `most` slots from the front of the longest run: the first one, how many."""
        start = self._by_length[-1][1]
        return start, self.take(start, most)

    def take_each(self, most: list[int]) -> tuple[list[int], list[int]]:
        """Take slots for several owners from the longest runs, one owner after the other.

        Args:
            most: for each of them, at least 1; as many as all of these together are free.

        Returns for each the first slot, and how many: as many as its run has left, at most `most`.
        """
        firsts, counts = [], []
        at, start, left = len(self._by_length), 0, 0
        for wanted in most:
            if not left:
                at -= 1
                left, start = self._by_length[at]
            taken = min(wanted, left)
            firsts.append(start)
            counts.append(taken)
            start += taken
            left -= taken
        gone = [first for _, first in self._by_length[at:]]
        del self._by_length[at:]
        for first in gone:
            del self._length[first]
        if len(gone) > _FEW:
            self._starts = sorted(self._length)
        else:
            for first in gone:
                del self._starts[bisect_left(self._starts, first)]
        if left:
            self._add(start, left)
        return firsts, counts

    def take(self, start: int, most: int) -> int:
        """Take up to `most` slots from the front of a run; how many."""
        length = self._remove(start)
        if length <= most:
            return length
        self._add(start + most, length - most)
        return most

    def insert(self, first: int, n: int) -> None:
        """`n` slots are free: they join the runs that they touch."""
        if not n:
            return
        if first + n in self._length:
            n += self._remove(first + n)
        at = bisect_left(self._starts, first)
        if at:
            before = self._starts[at - 1]
            if before + self._length[before] == first:
                n += self._remove(before)
                first = before
        self._add(first, n)

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._length[start] = length
        insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        length = self._length.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length
