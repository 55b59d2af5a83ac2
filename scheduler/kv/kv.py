"""Where keys and values live: private slots of sequences, shared slots of the prefix tree.

At any time every slot is free, in the tree, or private to one sequence or one beam search:

    free + tree + private == total

A sequence begins with the tree's longest prefix of the tokens that it needs, locked. What it
computes goes to private slots. Once the needed tokens have been computed, the tree owns their
slots, where siblings and later requests find them; when it ends or is preempted, its outputs follow
(but for beams). What is evicted or preempted may be copied to the host's memory, and come back to
other slots (`host_kv`).

Of layers with a window, tokens have slots besides, for as long as they are read (`windows`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokenpod.scheduler.kv.offload import Offload
from tokenpod.scheduler.kv.states import States
from tokenpod.scheduler.pool.radix import Node, RadixTree, Slots
from tokenpod.scheduler.pool.slot_allocator import Extent, SlotAllocator, covers, slots_of
from tokenpod.scheduler.pool.slot_pool import SlotPool
from tokenpod.scheduler.pool.tails import Tails
from tokenpod.scheduler.pool.windows import Windows
from tokenpod.scheduler.sequences.sequence import Owner, Sequence
from tokenpod.scheduler.sequences.table import Ints, Table
from tokenpod.scheduler.sequences.work import SnapshotLimits

#: For so many sequences without room the best place is looked for, also if little is free.
MOST_ONE_BY_ONE = 8

_NO_SLOTS: Slots = np.empty(0, np.int64)


class KV:
    """The KV pool's bookkeeping.

    Args:
        slots: of the pool.
        caching: keep what has been computed for later requests; if False, only the samples of one
            request share its prompt.
        by_uses: evict what few requests have used, and not what was used longest ago.
        offload: what the host's memory holds; None: nothing.
        windows: window slots of tokens; None: every layer has all tokens in the pool's slots.
        snapshots: of rows' states, behind which prompts begin; None: rows keep none, or nothing is
            cached.
    """

    def __init__(
        self,
        slots: int,
        *,
        caching: bool = True,
        by_uses: bool = False,
        offload: Offload | None = None,
        windows: Windows | None = None,
        snapshots: SnapshotLimits | None = None,
    ) -> None:
        assert offload is None or windows is None, "the host's memory holds whole tokens"
        self.total = slots
        #: Columns of the sequences that keys and values belong to.
        self.table = Table()
        self._caching = caching
        self.tree = RadixTree(by_uses=by_uses)
        self.states = States(self.tree, snapshots) if snapshots and caching else None
        self._allocator = SlotAllocator(slots)
        self.offload, self.windows = offload, windows
        #: Takes and frees the slots.
        self.pool = SlotPool(self._allocator, self.tree)
        if offload is not None:
            self.tree.spill = offload.spill

    @property
    def free(self) -> int:
        """Slots with nothing in them."""
        return self._allocator.free

    @property
    def available(self) -> int:
        """Slots that can be allocated: free ones, and the tree's that no sequence uses."""
        return self._allocator.free + self.tree.evictable

    def begin(self, sequence: Sequence) -> None:
        """Find and lock the longest cached prefix of the tokens that a sequence needs.

        The last one is always computed: its logits are wanted. A prompt whose tokens are to be
        scored is computed whole, by its first sample; so is one that is read for its vectors.
        """
        request, usable = sequence.request, sequence.inputs[:-1]
        whole = sequence.pooled or (request.prompt_logprobs and sequence.scored)
        if not self._caching or whole:
            usable = usable[: sequence.ready_tokens]
        node, length = self.tree.match(usable, request.salt)
        if self.windows is not None and length:
            held = self.windows.reach(self.tree.slots(node))
            if held < length:
                node, length = self.tree.match(usable[:held], request.salt)
        if self.states is not None and not sequence.ready_tokens:
            node, length = self.states.begin(sequence, node, length)
        self.tree.lock(node)
        self._begin_after(sequence, node, length)
        if self.offload is not None and sequence.owner is not Owner.PROBE:
            # Virtual tokens that are ready are in the pool by the time it runs.
            self.offload.begin(sequence, max(length, sequence.ready_tokens))

    def place_virtual(self, sequence: Sequence) -> Slots:
        """Put virtual tokens whose keys and values are ready into the tree, as far as need be.

        The sequence, which has begun, goes on behind them.

        Returns [n] the slots of the last n of them, int64: whoever runs the next step fills them.
        """
        request, node, virtual = sequence.request, sequence.node, sequence.ready_tokens
        if sequence.shared >= virtual:
            return _NO_SLOTS
        assert node is not None
        tokens = sequence.inputs[:virtual]
        # Another one may have put them there since this one has begun.
        found, known = self.tree.match(tokens, request.salt)
        self.tree.lock(found)
        slots = self.pool.take(virtual - known, known)
        end = self.tree.append(found, tokens[known:], slots)
        self.tree.lock(end)
        self.tree.unlock(found)
        self.tree.unlock(node)
        sequence.begin_after(end, virtual)
        if self.windows is not None and sequence.trail is not None:
            slots = self.tree.slots(end)
            held = self.windows.reach(slots[:known])
            known = held if held == known else 0  # they are filled anew, with the same numbers
            self.windows.end(sequence.trail)
            trail = sequence.trail = self.windows.begin(slots[:known])
            self.table.trail[sequence.place] = trail.at
            slots = slots[known:]
            self.windows.extend(trail, slots, known)
        if self.offload is not None and not sequence.began_at:
            sequence.cached += self.offload.to_fetch(sequence)
        self.pool.unfilled.update(slots.tolist())
        return slots

    def known(self, sequence: Sequence) -> int:
        """Needed tokens that are computed, or if the sequence has not begun, need not be."""
        offload = self.offload
        if sequence.node is not None:
            return sequence.computed + (0 if offload is None else offload.to_fetch(sequence))
        if self.states is not None:
            return self.states.known(sequence)
        cached = self.tree.known(sequence.inputs[:-1], sequence.request.salt)
        cached = max(cached, sequence.ready_tokens)
        return cached if offload is None else offload.known(sequence, cached)

    def follow(self, sibling: Sequence, first: Sequence) -> None:
        """Begin a sample with the prompt of the first one, which has just been published."""
        assert first.node is not None
        if first.node.listed:
            self.begin(sibling)
            return
        self.tree.lock(first.node)
        self._begin_after(sibling, first.node, first.shared)

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `begin`."""
        if self.offload is not None:
            self.offload.withdraw(sequence)
        if self.states is not None:
            self.states.forget(sequence)
        self._unlock(sequence)
        sequence.shared = sequence.computed = 0

    def fetch(self, sequence: Sequence) -> None:
        """Have what the host's memory has of a sequence copied. Raises OutOfSlots."""
        assert self.offload is not None
        n = self.offload.to_fetch(sequence)
        self.offload.fetch(sequence, self.extend(sequence, n))
        sequence.computed += n

    def swap_out(self, sequence: Sequence) -> bool:
        """Keep what a sequence has computed in the host's memory; False: there is no room.

        `release` comes next.
        """
        if self.offload is None or sequence.node is None:
            return False
        n = min(sequence.computed, sequence.length)
        slots = [self.tree.slots(sequence.node)[:n]]
        if n > sequence.shared:
            slots.append(slots_of(sequence.extents, sequence.shared, n - sequence.shared))
        return self.offload.swap_out(sequence, np.concatenate(slots))

    def prefix_slots(self, sequence: Sequence) -> Slots:
        """[n] the slots of the cached prefix and of what is copied behind it, int64, at first."""
        node, offloaded = sequence.node, sequence.offloaded
        assert node is not None
        slots = _NO_SLOTS if node.parent is None else self.tree.slots(node)
        if offloaded is not None and (copied := offloaded.end - sequence.shared) > 0:
            slots = np.append(slots, slots_of(sequence.extents, sequence.shared, copied))
        if sequence.tails is None:
            return slots
        return np.concatenate((slots, sequence.tails.before_step(sequence.id)))

    def extend(self, sequence: Sequence, n: int) -> Slots:
        """[n] slots for the next `n` positions, int64. Raises OutOfSlots if fewer are available."""
        slots = self._grow(sequence, n)
        if self.windows is not None and sequence.trail is not None:
            self.windows.extend(sequence.trail, slots, sequence.computed)
        return slots

    def _grow(self, sequence: Sequence, n: int) -> Slots:
        position, extents = sequence.computed, sequence.extents
        slots = self.pool.grow(extents, position, n, max(sequence.bound - position - n, 0))
        self.table.tail[sequence.place] = extents[-1].at
        return slots

    def take_back(self, sequence: Sequence, n: int) -> None:
        """Uncompute the last `n` positions, which are private: the next ones take their slots."""
        sequence.computed -= n
        if self.windows is not None and sequence.trail is not None:
            self.windows.take_back(sequence.trail, n)
        sequence.behind = True
        extents = sequence.extents
        while (over := n - extents[-1].used) > 0:
            self._allocator.release(extents.pop())
            n = over
        self._allocator.shrink(extents[-1], n)
        self.table.tail[sequence.place] = extents[-1].at

    def branch(self, first: Sequence, others: list[Sequence]) -> None:
        """Let `others` go on from where `first` is: what is not in the tree they share as `Tails`.

        `first` has computed its prompt, and published it if anybody could use it.
        """
        assert first.node is not None
        n = first.private
        slots = slots_of(first.extents, first.shared, n) if n else _NO_SLOTS
        bound = n + (len(others) + 1) * (first.bound - first.computed)
        tails = Tails(
            self.pool,
            first.extents,
            taken=first.shared + n,
            bound=first.shared + bound,
            windows=self.windows,
            trail=first.trail,
        )
        self._keep(first, [])
        first.trail = None
        tails.begin([each.id for each in (first, *others)], slots)
        first.tails = tails
        for other in others:
            self.tree.lock(first.node)
            other.begin_after(first.node, first.shared)
            other.computed = first.computed
            other.tails = tails

    def extend_each(self, sequences: list[Sequence], places: Ints) -> Slots:
        """[n] a slot for the next position of each of these, int64. Raises OutOfSlots.

        `places`: [n] int64, theirs in the table.
        """
        slots = self._grow_each(sequences, places)
        if self.windows is not None:
            for at in self.windows.extend_each(self.table.trail[places], slots).tolist():
                trail = sequences[at].trail
                assert trail is not None
                self.windows.extend(trail, slots[at : at + 1], sequences[at].computed)
        return slots

    def _grow_each(self, sequences: list[Sequence], places: Ints) -> Slots:
        tails = self.table.tail[places]
        roomy = self._allocator.rooms[tails] > 0
        if np.count_nonzero(roomy) == len(roomy):
            return self._allocator.grow_each(tails)
        slots = np.empty(len(places), np.int64)
        slots[roomy] = self._allocator.grow_each(tails[roomy])
        others = np.flatnonzero(~roomy)
        which, there = [sequences[at] for at in others.tolist()], places[others]
        extents: list[Extent] = []
        if len(which) > MOST_ONE_BY_ONE:
            positions = self.table.computed[there]
            extents = self.pool.grow_apart(positions, self.table.bound[there] - positions - 1)
        if not extents:
            slots[others] = [self._grow(sequence, 1)[0] for sequence in which]
            return slots
        for sequence, extent in zip(which, extents, strict=True):
            sequence.extents.append(extent)
        at = self.table.tail[there] = np.array([extent.at for extent in extents])
        slots[others] = self._allocator.firsts[at]
        return slots

    def room_of(self, places: Ints) -> int:
        """Positions by which each of these sequences can grow where it is."""
        return int(self._allocator.rooms[self.table.tail[places]].min())

    def extend_all(self, places: Ints, n: int) -> None:
        """The next `n` positions of each of these sequences, which have room for them."""
        self._allocator.grow_each(self.table.tail[places], n)

    def publish_inputs(self, sequence: Sequence, *, awaited: bool) -> None:
        """Move the slots of a sequence's needed positions, which are computed, to the tree.

        If another sequence has published part of them meanwhile, the sequence keeps its private
        slots: if it locked the other's too, that part would take slots twice for longer than
        admission counted. Siblings that wait for the prompt then share the sequence's own copy
        among themselves: all of it but the last token, which each of them computes.

        Args:
            sequence: has settled the first output after its needed positions.
            awaited: whether siblings wait for its prompt.
        """
        assert sequence.node is not None
        if sequence.node.listed:
            self._publish_inputs(sequence, awaited=awaited)
        if self.states is not None:
            # Those of a prefix that the tree has by another, too.
            self.states.publish(sequence)

    def _publish_inputs(self, sequence: Sequence, *, awaited: bool) -> None:
        assert sequence.node is not None
        node, known = self.tree.match(sequence.inputs, sequence.request.salt)
        end = sequence.needed
        if self._caching and (known <= sequence.shared or self._renew(sequence, node, known)):
            if known < end:
                slots = self._hand_over(sequence, known, end)
                node = self.tree.append(node, sequence.inputs[known:], slots)
        elif awaited and end - 1 > sequence.shared:
            end -= 1
            slots = self._hand_over(sequence, sequence.shared, end)
            tokens = sequence.inputs[sequence.shared : end]
            node = self.tree.hang_unlisted(sequence.node, tokens, slots)
        else:
            return
        self.tree.lock(node)
        self.tree.unlock(sequence.node)
        sequence.node = node
        sequence.shared = end

    def release(self, sequence: Sequence) -> None:
        """Take all slots of a sequence: what it computed goes to the tree, the rest is free."""
        if sequence.node is None:
            return
        if self.offload is not None:
            self.offload.withdraw(sequence)
        if sequence.tails is not None:
            sequence.tails.leave(sequence.id)
            sequence.tails = None
            self._unlock(sequence)
            return
        if self.states is not None:
            self.states.ended(sequence)
        computed = min(sequence.computed, sequence.length)
        if self.windows is not None and sequence.trail is not None:
            self.windows.take_back(sequence.trail, sequence.computed - computed)
        if self._caching and sequence.keep and computed > sequence.shared:
            tokens = sequence.all_tokens(computed)
            node, known = self.tree.match(tokens, sequence.request.salt)
            if known < computed and covers(sequence.extents, known):
                self.tree.append(node, tokens[known:], self._hand_over(sequence, known, computed))
        if self.states is not None:
            self.states.publish(sequence)
            self.states.forget(sequence)
        self.pool.release(sequence.extents)
        self._keep(sequence, [])
        self._unlock(sequence)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every slot is in exactly one place."""
        owner = np.zeros(self.total, np.int64)
        private = 0
        sequences = list(sequences)
        for sequence in sequences:
            if sequence.tails is None:
                used = sum(extent.used for extent in sequence.extents)
                assert used == sequence.private, sequence.id
        tails = {id(s.tails): s.tails for s in sequences if s.tails is not None}.values()
        for each in tails:
            each.check()
        for extents in (*(each.extents for each in tails), *(s.extents for s in sequences)):
            for extent in extents:
                owner[extent.first : extent.end] += 1
                private += extent.used
        self.tree.check()
        for node in self.tree.nodes():
            owner[node.slots] += 1
        for first, length in self._allocator.free_runs():
            owner[first : first + length] += 1
        assert (owner == 1).all(), f"slots in no or two places: {np.flatnonzero(owner != 1)[:8]}"
        parts = self.free, self.tree.tokens, private
        assert sum(parts) == self.total, (*parts, self.total)
        if self.offload is not None:
            self.offload.check(sequences)
        if self.windows is not None:
            trails = [*(each.trail for each in sequences), *(each.trail for each in tails)]
            self.windows.check(trail for trail in trails if trail is not None)
        if self.states is not None:
            self.states.check(sequences)

    def _begin_after(self, sequence: Sequence, node: Node, length: int) -> None:
        """Begin behind a prefix that is locked, and that may be read."""
        sequence.begin_after(node, length)
        if self.windows is not None:
            trail = sequence.trail = self.windows.begin(self.tree.slots(node))
            self.table.trail[sequence.place] = trail.at

    def _renew(self, sequence: Sequence, node: Node, known: int) -> bool:
        """Put a sequence's slots in place of those that the tree has of the same tokens.

        The sequence could not begin behind these, because their window slots are gone.

        Args:
            sequence: its needed positions have been computed.
            node: where the known ones of them end.
            known: how many they are.

        Returns False where that is not so, or others use the old ones.
        """
        if self.windows is None:
            return False
        stale = self.tree.unlocked(node, known - sequence.shared)
        if stale:
            slots = self._hand_over(sequence, sequence.shared, known)
            self.pool.free(self.tree.exchange(stale, slots))
        return bool(stale)

    def _unlock(self, sequence: Sequence) -> None:
        assert sequence.node is not None
        if self.windows is not None and sequence.trail is not None:
            self.windows.end(sequence.trail)
            sequence.trail = None
        self.pool.free(self.tree.unlock(sequence.node))
        sequence.node = None

    def evict(self, n: int) -> None:
        """Free at least `n` slots of the tree, or all that no sequence uses."""
        self.pool.evict(n)

    def flush(self) -> None:
        """Forget all cached prefixes that no sequence uses."""
        spill, self.tree.spill = self.tree.spill, None
        self.evict(self.tree.tokens)
        self.tree.spill = spill
        if self.windows is not None:
            self.windows.flush()
        if self.offload is not None:
            self.offload.tier.clear()

    def _hand_over(self, sequence: Sequence, start: int, end: int) -> Slots:
        """Take the slots of positions `start` to `end` from a sequence's private ones."""
        slots, extents = self._allocator.take_out(sequence.extents, start, end)
        self._keep(sequence, extents)
        return slots

    def _keep(self, sequence: Sequence, extents: list[Extent]) -> None:
        sequence.extents = extents
        self.table.tail[sequence.place] = extents[-1].at if extents else 0
