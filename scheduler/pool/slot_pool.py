"""Slots on demand: free ones, and where these don't suffice those of prefixes that nobody uses."""

from __future__ import annotations

import numpy as np

from tokenpod.scheduler.pool.radix import RadixTree, Slots
from tokenpod.scheduler.pool.slot_allocator import Extent, Ints, SlotAllocator, slots_of

#: Cached tokens are evicted for so much room at a time: outputs may end long before their bound.
ROOM_TO_EVICT_FOR = 128

#: For one run of that length, at most so many times as many are.
MOST_EVICTED = 8

_NO_SLOTS: Slots = np.empty(0, np.int64)


class SlotPool:
    """Takes slots for sequences, and evicts cached prefixes for them.

    Args:
        allocator: of all slots.
        tree: has the slots of cached prefixes.
    """

    def __init__(self, allocator: SlotAllocator, tree: RadixTree) -> None:
        self._allocator = allocator
        self._tree = tree
        #: Slots of the tree that the next plan fills with what adapters have.
        self.unfilled: set[int] = set()

    def take_unfilled(self) -> set[int]:
        """The slots of `unfilled`, which are filled now."""
        unfilled, self.unfilled = self.unfilled, set()
        return unfilled

    def take(self, n: int, position: int) -> Slots:
        """[n] slots that belong to no extent, int64."""
        if not n:
            return _NO_SLOTS
        self._make_space(n, 0)
        extents = self._allocator.allocate(n, position=position, room=0)
        slots = slots_of(extents, position, n)
        for extent in extents:
            self._allocator.drop(extent)
        return slots

    def grow(self, extents: list[Extent], position: int, n: int, room: int) -> Slots:
        """[n] slots more for whoever has `extents`, and `room` after them if there is any."""
        if not extents:
            self._make_space(n, room)
            extents += self._allocator.allocate(n, position=position, room=room)
            if len(extents) == 1:
                first = extents[0].first
                return np.arange(first, first + n)
        else:
            last = extents[-1]
            if n > last.room:
                self._make_space(n - last.room, room)
            extents += self._allocator.grow(last, n, room)
        return slots_of(extents, position, n)

    def grow_apart(self, positions: Ints, rooms: Ints) -> list[Extent]:
        """A new extent for each of many sequences, of one slot and some room; none: each gets more.

        There are none where `grow` finds a long run for each, if need be by eviction. Where it does
        not, what is left is divided, since looking for a place for each would be in vain.

        Args:
            positions: [n] int64, their next ones.
            rooms: [n] what follows these at most.
        """
        wanted = len(rooms) + int(np.minimum(rooms, ROOM_TO_EVICT_FOR).sum())
        if self._allocator.free + self._tree.evictable >= wanted:
            return []
        self.evict(self._tree.evictable)
        return self._allocator.allocate_each(positions, rooms)

    def release(self, extents: list[Extent]) -> None:
        """Free all slots of these, and their room."""
        for extent in extents:
            self._allocator.release(extent)

    def evict(self, n: int) -> None:
        """Free at least `n` slots of the tree, or all that no sequence uses."""
        for slots in self._tree.evict(n):
            self.free(slots)

    def free(self, slots: Slots) -> None:
        """Take slots back that no extent has: out of the tree, for instance."""
        if not len(slots):
            return
        if self.unfilled:
            self.unfilled.difference_update(slots.tolist())
        breaks = (slots[1:] != slots[:-1] + 1).nonzero()[0] + 1
        starts = [0, *breaks.tolist()]
        ends = [*starts[1:], len(slots)]
        for first, start, end in zip(slots[starts].tolist(), starts, ends, strict=True):
            self._allocator.release_run(first, end - start)

    def _make_space(self, n: int, room: int) -> None:
        """Evict for `n` slots and some room after them, if the other free slots are set aside.

        Slots that are evicted one by one while several sequences grow would go to these in turns:
        attention over scattered slots is slower, and every step would look for new ones. What is
        cached in pieces is freed in pieces, so more is evicted until a run is long enough; else
        pieces would become ever smaller.
        """
        wanted = n + min(room, ROOM_TO_EVICT_FOR)
        if self._allocator.longest >= wanted:
            return
        missing = wanted - self._allocator.unclaimed
        if missing > 0:
            self.evict(missing)
        for _ in range(MOST_EVICTED):
            if self._allocator.longest >= wanted or not self._tree.evictable:
                break
            self.evict(wanted)
