"""KV slots, contiguous first.

A slot has the keys and values of one token. Sequences grow by one slot per step, and attention over
one run of adjacent slots is several times cheaper than over scattered ones, so an allocation takes
*room*: adjacent slots that are set aside for its growth. Room is not guaranteed: it counts as free,
and the largest rooms are halved when others need the space.

    |  prompt  | grown | room ... |  prompt  | grown | room .......... |   free   |
    first      ----used-->        first
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_FIRST_EXTENTS = 64


class OutOfSlots(Exception):
    """More slots are wanted than are free."""


class Extent:
    """A run of slots that hold positions `position` to `position + used` of one sequence.

    Its numbers are in the allocator's columns, at `at`, so that many can grow at once.
    """

    __slots__ = ("_of", "at")

    def __init__(self, of: SlotAllocator, at: int) -> None:
        self._of = of
        self.at = at

    @property
    def position(self) -> int:
        """The position of the first slot."""
        return int(self._of.positions[self.at])

    @property
    def first(self) -> int:
        """The first slot."""
        return int(self._of.firsts[self.at])

    @property
    def used(self) -> int:
        """Slots of positions."""
        return int(self._of.used[self.at])

    @property
    def room(self) -> int:
        """Slots after the used ones that are set aside."""
        return int(self._of.rooms[self.at])

    @property
    def end(self) -> int:
        """One past the last used slot."""
        return int(self._of.firsts[self.at] + self._of.used[self.at])

    def __repr__(self) -> str:
        return f"Extent({self.position}: [{self.first}, {self.end}) + {self.room})"


class SlotAllocator:
    """Allocates slots 0 to total - 1."""

    def __init__(self, total: int) -> None:
        self.total = total
        #: Slots that can be allocated: unused ones, rooms included.
        self.free = total
        #: Free intervals without rooms: where they start, their lengths, and both by length.
        self._starts = [0] if total else []
        self._length = {0: total} if total else {}
        self._by_length = [(total, 0)] if total else []
        #: The extents, by `Extent.at`; 0 is none.
        self._columns = np.zeros((4, _FIRST_EXTENTS), np.int64)
        self._unnamed = list(range(_FIRST_EXTENTS - 1, 0, -1))
        self._name_columns()

    @property
    def unclaimed(self) -> int:
        """Free slots that are not set aside as room."""
        return self.free - int(self.rooms.sum())

    @property
    def longest(self) -> int:
        """The longest run of them."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, n: int, *, position: int, room: int) -> list[Extent]:
        """`n` slots for positions from `position` on: one run if there is one, else several.

        Raises OutOfSlots, with nothing taken, if fewer than `n` are free.
        """
        if n > self.free:
            raise OutOfSlots(f"{n} slots are wanted, {self.free} of {self.total} are free")
        start = self._fit(n, room)
        while start is None and self._halve_a_room(n):
            start = self._fit(n, room)
        if start is None:
            self._give_up_rooms()
            start = self._fit(n, room)
        if start is not None:
            return [self._claim(start, n, room, position)]
        return self._scatter(n, position)

    def grow(self, extent: Extent, n: int, room: int) -> list[Extent]:
        """`n` more slots after `extent`; returns the new extents beyond it, if any were needed.

        Args:
            extent: the last one of its sequence; takes what it can.
            n: slots.
            room: room for what cannot adjoin.
        """
        if n > self.free:
            raise OutOfSlots(f"{n} slots are wanted, {self.free} of {self.total} are free")
        at = extent.at
        taken = min(n, extent.room)
        self.used[at] += taken
        self.rooms[at] -= taken
        self.free -= taken
        if taken < n and extent.end in self._length:
            # The slots after it have been freed meanwhile.
            length = self._cut(extent.end, n - taken + room)
            more = min(n - taken, length)
            self.used[at] += more
            self.rooms[at] = length - more
            self.free -= more
            taken += more
        if taken == n:
            return []
        return self.allocate(n - taken, position=extent.position + extent.used, room=room)

    def grow_each(self, at: Ints, n: int = 1) -> Ints:
        """`n` more slots for each of these extents; they have room, and are different ones.

        Returns the first new slot of each.
        """
        slots = self.firsts[at] + self.used[at]
        self.used[at] += n
        self.rooms[at] -= n
        self.free -= n * len(at)
        return slots

    def shrink(self, extent: Extent, n: int) -> None:
        """The last `n` used slots of an extent are its room again."""
        self.used[extent.at] -= n
        self.rooms[extent.at] += n
        self.free += n

    def release(self, extent: Extent) -> None:
        """Free all slots of an extent, and its room."""
        self.free += extent.used
        self._insert(extent.first, extent.used + extent.room)
        self.drop(extent)

    def drop(self, extent: Extent) -> None:
        """Forget an extent whose slots have other owners."""
        self._columns[:, extent.at] = 0
        self._unnamed.append(extent.at)

    def release_run(self, first: int, n: int) -> None:
        """Free `n` slots that no extent has any more."""
        self.free += n
        self._insert(first, n)

    def take_out(self, extents: list[Extent], start: int, end: int) -> tuple[Ints, list[Extent]]:
        """Give the slots of positions `start` to `end` to another owner.

        `start` may lie within an extent: positions before it are in the tree, too, and their slots
        stay private.

        Returns [end - start] these slots, and the extents that are left.
        """
        slots = slots_of(extents, start, end - start)
        rest = []
        for extent in extents:
            stop = extent.position + extent.used
            if stop <= start or extent.position >= end:
                rest.append(extent)
                continue
            before = start - extent.position
            if before > 0:
                rest.append(self._split_front(extent, before))
            self._trim_front(extent, min(end, stop) - extent.position)
            rest.append(extent)
        # The last one stays even if it is empty: it has the position of the next slot.
        for extent in rest[:-1]:
            if not (extent.used or extent.room):
                self.drop(extent)
        return slots, [e for e in rest[:-1] if e.used or e.room] + rest[-1:]

    def free_runs(self) -> list[tuple[int, int]]:
        """(first, length) of what is free, rooms included, for checks."""
        roomy = np.flatnonzero(self.rooms)
        ends = self.firsts[roomy] + self.used[roomy]
        rooms = zip(ends.tolist(), self.rooms[roomy].tolist(), strict=True)
        return sorted([*self._length.items(), *rooms])

    # -- free intervals ------------------------------------------------------------------------

    def _fit(self, n: int, room: int) -> int | None:
        """The smallest interval with room, else the largest without."""
        if self.longest < n:
            return None
        at = bisect_left(self._by_length, (n + room, 0))
        return self._by_length[min(at, len(self._by_length) - 1)][1]

    def _claim(self, start: int, n: int, room: int, position: int) -> Extent:
        length = self._cut(start, n + room)
        self.free -= n
        return self._name(position, start, n, length - n)

    def _scatter(self, n: int, position: int) -> list[Extent]:
        extents = []
        while n:
            start = self._by_length[-1][1]
            extent = self._claim(start, min(n, self._length[start]), 0, position)
            extents.append(extent)
            position += extent.used
            n -= extent.used
        return extents

    def _cut(self, start: int, most: int) -> int:
        """Take up to `most` slots from the front of an interval; how many."""
        length = self._remove(start)
        if length <= most:
            return length
        self._add(start + most, length - most)
        return most

    def _insert(self, first: int, n: int) -> None:
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

    # -- extents -------------------------------------------------------------------------------

    def _name(self, position: int, first: int, used: int, room: int) -> Extent:
        if not self._unnamed:
            names = self._columns.shape[1]
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
            self._unnamed = list(range(2 * names - 1, names - 1, -1))
            self._name_columns()
        at = self._unnamed.pop()
        self._columns[:, at] = position, first, used, room
        return Extent(self, at)

    def _trim_front(self, extent: Extent, n: int) -> None:
        """Another owner takes the first `n` slots of `extent`."""
        self.firsts[extent.at] += n
        self.positions[extent.at] += n
        self.used[extent.at] -= n

    def _split_front(self, extent: Extent, n: int) -> Extent:
        """Cut the first `n` slots of `extent` off as an extent of their own."""
        front = self._name(extent.position, extent.first, n, 0)
        self._trim_front(extent, n)
        return front

    def _name_columns(self) -> None:
        self.positions, self.firsts, self.used, self.rooms = self._columns

    def _halve_a_room(self, n: int) -> bool:
        """Free the far half of the largest room, if `n` slots fit into it."""
        at = int(self.rooms.argmax())
        half = int(self.rooms[at]) // 2
        if half < n:
            return False
        self.rooms[at] -= half
        self._insert(int(self.firsts[at] + self.used[at] + self.rooms[at]), half)
        return True

    def _give_up_rooms(self) -> None:
        for at in np.flatnonzero(self.rooms):
            self._insert(int(self.firsts[at] + self.used[at]), int(self.rooms[at]))
            self.rooms[at] = 0


def covers(extents: list[Extent], position: int) -> bool:
    """Whether one of these has the slot of `position`."""
    return any(e.position <= position < e.position + e.used for e in extents)


def slots_of(extents: list[Extent], position: int, n: int) -> Ints:
    """[n] the private slots of the positions from `position` on, int64."""
    runs: list[Ints] = []
    # Most often the last ones are wanted.
    for extent in reversed(extents):
        low = max(position, extent.position)
        high = min(position + n, extent.position + extent.used)
        if low < high:
            first = extent.first - extent.position
            runs.append(np.arange(first + low, first + high, dtype=np.int64))
        if extent.position <= position:
            break
    slots = np.concatenate(runs[::-1]) if len(runs) != 1 else runs[0]
    assert len(slots) == n, "a position without a slot"
    return slots
