"""Slots of a beam search's outputs: beams have them in common by reference, nothing is copied.

    prompt in the tree | a0 a1 a2 ...      beam 0: a0 a1 a2
                       |    b1 b2 ...      beam 1: a0 b1 b2, forked from beam 0 after a0

All tails are equally long. A slot that no beam refers to any more is spare, and is used again
before the search takes new ones: with w beams that have computed n outputs it has at most w * n.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np

from tokenpod.scheduler.pool.radix import Slots
from tokenpod.scheduler.pool.slot_allocator import Extent
from tokenpod.scheduler.pool.slot_pool import SlotPool
from tokenpod.scheduler.pool.windows import Trail, Windows

_NO_SLOTS: Slots = np.empty(0, np.int64)


class Tails:
    """The tails of one search's sequences, by their ids.

    Args:
        pool: gives more slots.
        extents: where all slots lie, and room for more.
        taken: position at which the next slot is taken; the extents count all slots as positions of
            one sequence.
        bound: `taken` will become that at most.
        windows: gives window slots, of `trail`; None: there are none.
    """

    def __init__(
        self,
        pool: SlotPool,
        extents: list[Extent],
        *,
        taken: int,
        bound: int,
        windows: Windows | None = None,
        trail: Trail | None = None,
    ) -> None:
        self._pool, self._windows = pool, windows
        self.trail = trail
        self.extents = extents
        self.taken = taken
        self.bound = bound
        #: [n] slots that no sequence refers to.
        self.spare = _NO_SLOTS
        self._slots: dict[int, Slots] = {}
        #: The last slot of each tail is written by a step that is being planned.
        self._stepping = False

    def begin(self, sequence_ids: Listing[int], slots: Slots) -> None:
        """Let every sequence begin with the same slots, [n]."""
        self._slots = dict.fromkeys(sequence_ids, slots)

    def before_step(self, sequence_id: int) -> Slots:
        """[n] the slots that are written before the step that is being planned."""
        slots = self._slots[sequence_id]
        return slots[:-1] if self._stepping else slots

    def extend(self, sequence_ids: Listing[int], position: int) -> Slots:
        """[n] a slot for the next position of each of these, int64. Raises OutOfSlots."""
        n = len(sequence_ids)
        missing = n - len(self.spare)
        if missing > 0:
            room = max(self.bound - self.taken - missing, 0)
            slots = self._pool.grow(self.extents, self.taken, missing, room)
            self.taken += missing
            self.spare = np.concatenate((self.spare, slots))
        taken, self.spare = self.spare[:n], self.spare[n:]
        for sequence_id, slot in zip(sequence_ids, taken, strict=True):
            self._slots[sequence_id] = np.append(self._slots[sequence_id], slot)
        if self._windows is not None and self.trail is not None:
            self._windows.extend(self.trail, taken, position, beams=True)
        self._stepping = True
        return taken

    def settle(self, parents: dict[int, int]) -> None:
        """The step is over: every sequence goes on from one of them, mostly from itself."""
        self._stepping = False
        before = self._slots
        self._slots = {sequence_id: before[parent] for sequence_id, parent in parents.items()}
        continued = {*parents.values()}
        dropped = [slots for sequence_id, slots in before.items() if sequence_id not in continued]
        self._free(dropped)

    def leave(self, sequence_id: int) -> None:
        """A sequence has ended; with the last one all slots are free."""
        self._free([self._slots.pop(sequence_id, _NO_SLOTS)])
        if not self._slots:
            self._pool.release(self.extents)
            if self._windows is not None and self.trail is not None:
                self._windows.end(self.trail)

    def check(self) -> None:
        """Raise AssertionError unless every slot is in some tail, or else spare."""
        own = [np.arange(extent.first, extent.end) for extent in self.extents]
        parts = [np.unique(np.concatenate([*self._slots.values()])), self.spare]
        held = np.sort(np.concatenate(parts))
        assert np.array_equal(held, np.sort(np.concatenate(own or [_NO_SLOTS]))), held
        assert len({len(slots) for slots in self._slots.values()}) == 1
        assert self.taken <= self.bound, (self.taken, self.bound)

    def _free(self, dropped: list[Slots]) -> None:
        """Slots of tails that are gone are spare where no other has the same slot."""
        dropped = [slots for slots in dropped if len(slots)]
        if not dropped:
            return
        if not self._slots:
            unused = dropped
        else:
            # A slot is at the same place in all tails that have it.
            living = np.stack([*self._slots.values()])
            unused = [slots[(living != slots).all(axis=0)] for slots in dropped]
        self.spare = np.concatenate((self.spare, np.unique(np.concatenate(unused))))
