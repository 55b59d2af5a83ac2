"""Where keys and values live: private slots of sequences, shared slots of the prefix tree.

At any time every slot is free, in the tree, or private to one sequence:

    free + tree + private == total

A sequence begins with the tree's longest prefix of its prompt, locked. What it computes goes to
slots of its own. Once its prompt has been computed, those slots move to the tree, where siblings
and later requests find them; when it ends, its outputs follow.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokenpod.scheduler.radix import RadixTree, Slots
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.slots import Extent, SlotAllocator
from tokenpod.scheduler.table import Ints, Table

#: Cached tokens are evicted for so much room at a time: outputs may end long before their bound.
ROOM_TO_EVICT_FOR = 128

#: For one run of that length, at most so many times as many are.
MOST_EVICTED = 4

_NO_SLOTS: Slots = np.empty(0, np.int64)


class KV:
    """The KV pool's bookkeeping.

    Args:
        slots: of the pool.
        caching: keep what has been computed for later requests; else only the samples of one
            request share its prompt.
    """

    def __init__(self, slots: int, *, caching: bool = True) -> None:
        self.total = slots
        #: Of the sequences that keys and values belong to.
        self.table = Table()
        self._caching = caching
        self.tree = RadixTree()
        self._allocator = SlotAllocator(slots)

    @property
    def free(self) -> int:
        """Slots with nothing in them."""
        return self._allocator.free

    @property
    def available(self) -> int:
        """Slots that can be had: free ones, and the tree's that nobody uses."""
        return self._allocator.free + self.tree.evictable

    def begin(self, sequence: Sequence) -> None:
        """Find and lock the longest cached prefix of a sequence's prompt.

        The last prompt token is always computed: its logits are wanted. A prompt whose tokens are
        to be scored is computed whole, by its first sample.
        """
        request = sequence.request
        whole = request.prompt_logprobs and sequence.stream == 0
        usable = 0 if whole or not self._caching else sequence.prompt_length - 1
        node, length = self.tree.match(sequence.prompt[:usable], request.salt)
        self.tree.lock(node)
        sequence.node = node
        sequence.shared = sequence.cached = sequence.computed = length

    def known(self, sequence: Sequence) -> int:
        """Prompt tokens that need not be computed (any more), as far as the tree knows now."""
        if sequence.node is not None:
            return sequence.computed
        usable = sequence.prompt[: sequence.prompt_length - 1]
        return self.tree.known(usable, sequence.request.salt)

    def follow(self, sibling: Sequence, first: Sequence) -> None:
        """Begin a sample with the prompt of the first one, which has just been shared."""
        assert first.node is not None
        if first.node.listed:
            self.begin(sibling)
            return
        self.tree.lock(first.node)
        sibling.node = first.node
        sibling.shared = sibling.cached = sibling.computed = first.shared

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `begin`."""
        self._unlock(sequence)
        sequence.shared = sequence.cached = sequence.computed = 0

    def prefix_slots(self, sequence: Sequence) -> Slots:
        """[cached] the slots of the cached prefix."""
        assert sequence.node is not None
        return self.tree.slots(sequence.node) if sequence.cached else _NO_SLOTS

    def extend(self, sequence: Sequence, n: int) -> Slots:
        """[n] slots for the next `n` positions; raises OutOfSlots."""
        position = sequence.computed
        room = max(sequence.bound - position - n, 0)
        extents = sequence.extents
        if not extents:
            self._make_space(n, room)
            extents += self._allocator.allocate(n, position=position, room=room)
        else:
            last = extents[-1]
            if n > last.room:
                self._make_space(n - last.room, room)
            extents += self._allocator.grow(last, n, room)
        self.table.tail[sequence.place] = extents[-1].at
        return _slots_from(extents, position, n)

    def extend_each(self, places: Ints) -> tuple[Ints, Slots]:
        """A slot for the next position of each sequence whose last extent has room for it.

        Returns the indices into `places` of the others, which `extend` serves, and [n] slots, of
        which theirs mean nothing.
        """
        tails = self.table.tail[places]
        roomy = self._allocator.rooms[tails] > 0
        if roomy.all():
            return _NO_SLOTS, self._allocator.grow_each(tails)
        slots = np.empty(len(places), np.int64)
        slots[roomy] = self._allocator.grow_each(tails[roomy])
        return np.flatnonzero(~roomy), slots

    def share_prompt(self, sequence: Sequence, *, awaited: bool) -> None:
        """Move a computed prompt's slots to the tree.

        If somebody else brought part of it there meanwhile, the sequence keeps to its own slots:
        with a lock on the other's it would hold that part twice, for longer than was forecast.
        Siblings that await the prompt then share the sequence's own copy among themselves: all of
        it but the last token, which each of them computes.
        """
        assert sequence.node is not None
        if not sequence.node.listed:
            return
        node, known = self.tree.match(sequence.prompt, sequence.request.salt)
        end = sequence.prompt_length
        if known <= sequence.shared and self._caching:
            slots = self._hand_over(sequence, known, end)
            node = self.tree.append(node, sequence.prompt[known:], slots)
        elif awaited and end - 1 > sequence.shared:
            end -= 1
            slots = self._hand_over(sequence, sequence.shared, end)
            tokens = sequence.prompt[sequence.shared : end]
            node = self.tree.hang_unlisted(sequence.node, tokens, slots)
        else:
            return
        self.tree.lock(node)
        self.tree.unlock(sequence.node)
        sequence.node = node
        sequence.shared = end

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's slots: what it computed goes to the tree, the rest is free."""
        if sequence.node is None:
            return
        computed = min(sequence.computed, sequence.length)
        if self._caching and sequence.keep and computed > sequence.shared:
            tokens = sequence.all_tokens(computed)
            node, known = self.tree.match(tokens, sequence.request.salt)
            if known < computed and _covers(sequence, known):
                self.tree.append(node, tokens[known:], self._hand_over(sequence, known, computed))
        for extent in sequence.extents:
            self._allocator.release(extent)
        self._keep(sequence, [])
        self._unlock(sequence)

    def forget_unused(self) -> None:
        """Empty the tree of what nobody uses."""
        self._evict(self.tree.evictable)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every slot is in exactly one place."""
        owner = np.zeros(self.total, np.int64)
        private = 0
        for sequence in sequences:
            for extent in sequence.extents:
                owner[extent.first : extent.end] += 1
                private += extent.used
            assert sum(extent.used for extent in sequence.extents) == sequence.held, sequence.id
        tree = 0
        for node in self.tree.nodes():
            owner[node.slots] += 1
            tree += len(node.slots)
        for first, length in self._allocator.free_runs():
            owner[first : first + length] += 1
        assert (owner == 1).all(), f"slots in no or two places: {np.flatnonzero(owner != 1)[:8]}"
        assert tree == self.tree.tokens, (tree, self.tree.tokens)
        assert self.free + tree + private == self.total, (self.free, tree, private, self.total)
        locked = sum(len(node.tokens) for node in self.tree.nodes() if node.locks)
        assert locked == self.tree.locked_tokens, (locked, self.tree.locked_tokens)

    def _unlock(self, sequence: Sequence) -> None:
        assert sequence.node is not None
        self._free(self.tree.unlock(sequence.node))
        sequence.node = None

    def _make_space(self, n: int, room: int) -> None:
        """Evict what `n` slots and some room after them need, if others have a claim on the rest.

        Slots that are freed one by one, as several sequences grow side by side, end up in turns
        with one and the other: attention over them is slower, and every step looks for new ones.
        What is cached in pieces is freed in pieces, so more is evicted until a run is whole again;
        else pieces would become ever smaller.
        """
        wanted = n + min(room, ROOM_TO_EVICT_FOR)
        missing = wanted - self._allocator.unclaimed
        if missing > 0:
            self._evict(missing)
        for _ in range(MOST_EVICTED):
            if self._allocator.longest >= wanted or not self.tree.evictable:
                break
            self._evict(wanted)

    def _evict(self, n: int) -> None:
        for slots in self.tree.evict(n):
            self._free(slots)

    def _free(self, slots: Slots) -> None:
        if not len(slots):
            return
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        for run in np.split(slots, breaks):
            self._allocator.release_run(int(run[0]), len(run))

    def _hand_over(self, sequence: Sequence, start: int, end: int) -> Slots:
        """Take the slots of positions `start` to `end` from a sequence's private ones.

        `start` may lie within an extent: what is before it is a duplicate of what the tree holds
        and stays private.
        """
        slots = _slots_from(sequence.extents, start, end - start)
        rest = []
        for extent in sequence.extents:
            stop = extent.position + extent.used
            if stop <= start or extent.position >= end:
                rest.append(extent)
                continue
            before = start - extent.position
            if before > 0:
                rest.append(self._allocator.split_front(extent, before))
            self._allocator.trim_front(extent, min(end, stop) - extent.position)
            rest.append(extent)
        # The last one stays even if it is empty: it knows at which position the next slot goes.
        for extent in rest[:-1]:
            if not (extent.used or extent.room):
                self._allocator.drop(extent)
        self._keep(sequence, [e for e in rest[:-1] if e.used or e.room] + rest[-1:])
        return slots

    def _keep(self, sequence: Sequence, extents: list[Extent]) -> None:
        sequence.extents = extents
        self.table.tail[sequence.place] = extents[-1].at if extents else 0


def _covers(sequence: Sequence, position: int) -> bool:
    """Whether `position` is in a private slot."""
    return any(e.position <= position < e.position + e.used for e in sequence.extents)


def _slots_from(extents: list[Extent], position: int, n: int) -> Slots:
    """[n] the private slots of positions from `position` on."""
    runs: list[Slots] = []
    # Most often it is the last ones that are asked for.
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
