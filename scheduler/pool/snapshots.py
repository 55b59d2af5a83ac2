"""Snapshots of rows' states: which are free, which are somebody's, which end a prefix of the tree.

A snapshot belongs to nobody, to the sequence that has made it, or to the node of the tree whose
last token it is behind; that used longest ago makes room for another. One that a sequence is about
to begin with is pinned: it stays what it is until the sequence's row has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Holder(Protocol):
    """What a snapshot may be behind: a node of the tree."""

    state: Snapshot | None


class Snapshot:
    """The states of a row behind so many positions."""

    __slots__ = ("holder", "pins", "position", "slot")

    def __init__(self, slot: int, position: int) -> None:
        #: Where executors keep it, behind the states of rows.
        self.slot = slot
        self.position = position
        #: The node whose last token it is behind; None: it is a sequence's, or dropped.
        self.holder: Holder | None = None
        #: Sequences that are about to begin with it.
        self.pins = 0


class SnapshotPool:
    """So many snapshots, in slots from `first` on."""

    def __init__(self, total: int, first: int) -> None:
        self.total = total
        self._free = list(range(first + total - 1, first - 1, -1))
        #: Those that nodes hold, that used longest ago first.
        self._held: dict[Snapshot, None] = {}
        #: Dropped, but pinned.
        self._going: set[Snapshot] = set()

    def take(self, position: int) -> Snapshot | None:
        """A snapshot for a sequence; None: all are sequences', or pinned."""
        if not self._free:
            oldest = next((each for each in self._held if not each.pins), None)
            if oldest is None:
                return None
            self.drop(oldest)
        return Snapshot(self._free.pop(), position)

    def hold(self, snapshot: Snapshot, holder: Holder) -> None:
        """Let a node that has none hold a sequence's snapshot."""
        assert holder.state is None
        holder.state, snapshot.holder = snapshot, holder
        self._held[snapshot] = None

    def drop(self, snapshot: Snapshot) -> None:
        """Nobody holds it any more."""
        if snapshot.holder is not None:
            snapshot.holder.state, snapshot.holder = None, None
            del self._held[snapshot]
        if snapshot.pins:
            self._going.add(snapshot)
        else:
            self._free.append(snapshot.slot)

    def pin(self, snapshot: Snapshot) -> None:
        """A sequence is about to begin with it: it is used."""
        snapshot.pins += 1
        del self._held[snapshot]
        self._held[snapshot] = None

    def unpin(self, snapshot: Snapshot) -> None:
        """The sequence has begun with it, or does not."""
        snapshot.pins -= 1
        if not snapshot.pins and snapshot in self._going:
            self._going.remove(snapshot)
            self._free.append(snapshot.slot)

    def least_used(self, of: Iterable[Snapshot]) -> Snapshot | None:
        """Of these, which nodes hold, that used longest ago, if it is not pinned."""
        wanted = {each for each in of if not each.pins}
        return next((each for each in self._held if each in wanted), None)

    def check(self, private: int, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless every snapshot is in one place.

        Args:
            private: how many are sequences'.
            holders: all nodes of the tree.
        """
        held = [node.state for node in holders if node.state is not None]
        assert set(held) == self._held.keys(), "a node holds what is not known, or the other way"
        assert len(held) == len(self._held)
        parts = len(self._free), len(held), private, len(self._going)
        assert sum(parts) == self.total, (*parts, self.total)
        slots = {*self._free, *(each.slot for each in (*held, *self._going))}
        assert len(slots) == self.total - private, "a slot twice"
