"""KV slots, contiguous first.

A slot has the keys and values of one token. Sequences grow by one slot per step, and attention over
one run of adjacent slots is several times cheaper than over scattered ones, so an allocation takes
*room*: adjacent slots that are set aside for its growth. Room is not guaranteed: it counts as free,
and the largest rooms are halved when others need the space.

    |  prompt  | grown | room ... |  prompt  | grown | room .......... |   free   |
    first      ----used-->        first
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenpod.scheduler.pool.free_runs import FreeRuns

Ints = npt.NDArray[np.int64]

_FIRST_EXTENTS = 64
#: So many rooms are halved before all are given up.
_MOST_HALVED = 16


class OutOfSlots(Exception):
    """More slots are wanted than are free."""


class Extent:
    """A run of slots that hold positions `position` to `position + used` of one sequence.

    Its numbers are in the allocator's columns, at `at`, so that many can grow at once.
    """

    __slots__ = ("allocator", "at")

    def __init__(self, of: SlotAllocator, at: int) -> None:
        self.allocator = of
        self.at = at

    @property
    def position(self) -> int:
        """The position of the first slot."""
        return int(self.allocator.positions[self.at])

    @property
    def first(self) -> int:
        """The first slot."""
        return int(self.allocator.firsts[self.at])

    @property
    def used(self) -> int:
        """Slots of positions."""
        return int(self.allocator.used[self.at])

    @property
    def room(self) -> int:
        """Slots after the used ones that are set aside."""
        return int(self.allocator.rooms[self.at])

    @property
    def end(self) -> int:
        """One past the last used slot."""
        return int(self.allocator.firsts[self.at] + self.allocator.used[self.at])

    def __repr__(self) -> str:
        return f"Extent({self.position}: [{self.first}, {self.end}) + {self.room})"


class SlotAllocator:
    """Allocates slots 0 to total - 1."""

    def __init__(self, total: int) -> None:
        self.total = total
        #: Slots that can be allocated: unused ones, rooms included.
        self.free = total
        #: Free slots without rooms.
        self._runs = FreeRuns(total)
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
        return self._runs.longest

    def allocate(self, n: int, *, position: int, room: int) -> list[Extent]:
        """`n` slots for positions from `position` on: one run if there is one, else several.

        Raises OutOfSlots, with nothing taken, if fewer than `n` are free.
        """
        if n > self.free:
            raise OutOfSlots(f"{n} slots are wanted, {self.free} of {self.total} are free")
        start = self._runs.fit(n, room)
        while start is None and self._halve_a_room(n):
            start = self._runs.fit(n, room)
        if start is None:
            self._give_up_rooms()
            start = self._runs.fit(n, room)
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
        if taken < n and self._runs.begins_at(extent.end):
            # The slots after it have been freed meanwhile.
            length = self._runs.take(extent.end, n - taken + room)
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

    def allocate_each(self, positions: Ints, rooms: Ints) -> list[Extent]:
        """A slot for each of these positions, and room after it, where others lie in between.

        What is free is divided evenly, so that none takes what the next one needs.

        Args:
            positions: [n] of different sequences.
            rooms: [n] what each of them can use at most.

        Raises OutOfSlots, with nothing taken, if fewer than `n` are free.
        """
        n = len(positions)
        if n > self.free:
            raise OutOfSlots(f"{n} slots are wanted, {self.free} of {self.total} are free")
        for _ in range(_MOST_HALVED):
            if self.unclaimed >= n or not self._halve_a_room(1):
                break
        if (unclaimed := self.unclaimed) < n:
            self._give_up_rooms()
            unclaimed = self.free
        most = 1 + np.minimum(rooms, unclaimed // n - 1)
        firsts, counts = self._runs.take_each(most.tolist())
        while len(self._unnamed) < n:
            self._add_names()
        at = self._unnamed[-n:]
        del self._unnamed[-n:]
        self._columns[:, at] = positions, firsts, np.ones(n, np.int64), np.array(counts) - 1
        self.free -= n
        return [Extent(self, each) for each in at]

    def shrink(self, extent: Extent, n: int) -> None:
        """The last `n` used slots of an extent are its room again."""
        self.used[extent.at] -= n
        self.rooms[extent.at] += n
        self.free += n

    def release(self, extent: Extent) -> None:
        """Free all slots of an extent, and its room."""
        self.free += extent.used
        self._runs.insert(extent.first, extent.used + extent.room)
        self.drop(extent)

    def drop(self, extent: Extent) -> None:
        """Forget an extent whose slots have other owners."""
        self._columns[:, extent.at] = 0
        self._unnamed.append(extent.at)

    def release_run(self, first: int, n: int) -> None:
        """Free `n` slots that no extent has any more."""
        self.free += n
        self._runs.insert(first, n)

    def take_out(self, extents: list[Extent], start: int, end: int) -> tuple[Ints, list[Extent]]:
        """Give the slots of positions `start` to `end` to another owner.

        `start` may lie within an extent: positions before it are in the tree, too, and their slots
        stay private.

        Returns [end - start] these slots, and the extents that are left.
        """
        slots = slots_of(extents, start, end - start)
        rest = []
        for extent, (position, _, used, room) in zip(extents, self.numbers(extents), strict=True):
            stop = position + used
            if stop <= start or position >= end:
                rest.append(extent)
            elif position >= start and stop <= end and not room and extent is not extents[-1]:
                self.drop(extent)
            else:
                if position < start:
                    rest.append(self._split_front(extent, start - position))
                self._trim_front(extent, min(end, stop) - max(position, start))
                rest.append(extent)
        # The last one stays even if it is empty: it has the position of the next slot.
        for extent in rest[:-1]:
            if not (extent.used or extent.room):
                self.drop(extent)
        return slots, [e for e in rest[:-1] if e.used or e.room] + rest[-1:]

    def numbers(self, extents: list[Extent]) -> list[list[int]]:
        """Of each of these `position`, `first`, `used` and `room`."""
        if len(extents) == 1:  # most often
            return [self._columns[:, extents[0].at].tolist()]
        numbers: list[list[int]] = self._columns[:, [extent.at for extent in extents]].T.tolist()
        return numbers

    def free_runs(self) -> list[tuple[int, int]]:
        """(first, length) of what is free, rooms included, for checks."""
        roomy = np.flatnonzero(self.rooms)
        ends = self.firsts[roomy] + self.used[roomy]
        rooms = zip(ends.tolist(), self.rooms[roomy].tolist(), strict=True)
        return sorted([*self._runs.items(), *rooms])

    def _claim(self, start: int, n: int, room: int, position: int) -> Extent:
        length = self._runs.take(start, n + room)
        self.free -= n
        return self._name(position, start, n, length - n)

    def _scatter(self, n: int, position: int) -> list[Extent]:
        extents = []
        while n:
            first, taken = self._runs.take_longest(n)
            self.free -= taken
            extents.append(self._name(position, first, taken, 0))
            position += taken
            n -= taken
        return extents

    # -- extents -------------------------------------------------------------------------------

    def _name(self, position: int, first: int, used: int, room: int) -> Extent:
        if not self._unnamed:
            self._add_names()
        at = self._unnamed.pop()
        self._columns[:, at] = position, first, used, room
        return Extent(self, at)

    def _add_names(self) -> None:
        names = self._columns.shape[1]
        self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        self._unnamed[:0] = range(2 * names - 1, names - 1, -1)
        self._name_columns()

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
        self._runs.insert(int(self.firsts[at] + self.used[at] + self.rooms[at]), half)
        return True

    def _give_up_rooms(self) -> None:
        for at in np.flatnonzero(self.rooms):
            self._runs.insert(int(self.firsts[at] + self.used[at]), int(self.rooms[at]))
            self.rooms[at] = 0


def covers(extents: list[Extent], position: int) -> bool:
    """Whether one of these has the slot of `position`."""
    return any(e.position <= position < e.position + e.used for e in extents)


def slots_of(extents: list[Extent], position: int, n: int) -> Ints:
    """[n] the private slots of the positions from `position` on, int64."""
    last = extents[-1]
    if last.position <= position:  # most often
        numbers = [[last.position, last.first, last.used, 0]]
    else:
        numbers = last.allocator.numbers(extents)
    runs = []
    for begins, first, used, _ in numbers:
        low, high = max(position, begins), min(position + n, begins + used)
        if low < high:
            runs.append(np.arange(first + low - begins, first + high - begins, dtype=np.int64))
    slots = np.concatenate(runs) if len(runs) != 1 else runs[0]
    assert len(slots) == n, "a position without a slot"
    return slots
