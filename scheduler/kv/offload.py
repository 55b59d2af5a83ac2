"""Keys and values on their way between the pool and the host's memory.

    tree --a leaf is evicted--> out: the blocks that end in it, unless the host has them
    preempted sequence--------> out: all that it has computed, pinned until it comes back
    sequence that begins <----- in: what the host has behind its cached prefix

Copies are part of the next step's plan: first all that go out, then all that come in, before
anything else of it. Host slots are numbered behind the pool's. A sequence whose copies come in is
not planned before these have arrived, so that no other row waits for them; if there is nothing else
to compute, the step waits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from tokenpod.core.capacity import BLOCK
from tokenpod.core.messages import PROBE_TOKENS
from tokenpod.scheduler.pool.block_keys import Key, next_key, root_key
from tokenpod.scheduler.pool.offload_tier import Offloaded, OffloadTier
from tokenpod.scheduler.pool.radix import Node, Slots, Tokens
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.work import Limits

_NO_SLOTS: Slots = np.empty(0, np.int64)


class Offload:
    """What goes to the host's memory, and what comes back.

    Args:
        slots: tokens that the host's memory holds.
        first: number of its first slot in plans.
        caching: keep what is evicted; if False, only preempted sequences come here.
        least: fewer tokens than this are computed rather than copied, unless they went by a
            preemption.
        block: tokens that are kept together.
    """

    def __init__(
        self, slots: int, *, first: int, caching: bool = True, least: int = 1, block: int = BLOCK
    ) -> None:
        self.tier = OffloadTier(slots, block)
        self._block = block
        self._first = first
        self._caching = caching
        self._least = least
        #: Tokens since the start that went by preemptions, and that came back of all kinds.
        self.swapped_tokens = self.fetched_tokens = 0
        #: Copies of the next plan: slots from and to.
        self._out: list[tuple[Slots, Slots]] = []
        self._in: list[tuple[Slots, Slots]] = []
        #: Blocks that the next plan reads or writes, pinned: it does so once.
        self._busy: list[Key] = []
        #: The number of the step that is planned; of those whose copies come in, who gets them.
        self.step = 0
        self._flying: deque[tuple[int, Sequence]] = deque()
        #: The newest of them that are known to have arrived, and what plans have said of that.
        self._landed = self._told = 0

    # -- out -----------------------------------------------------------------------------------

    def spill(self, leaf: Node, keep: int) -> None:
        """All but the first `keep` tokens of a leaf are evicted: keep the blocks that end there."""
        start = _start(leaf)
        keys = _keys_of(leaf, start, self._block)
        first, cut = start // self._block, (start + keep) // self._block
        leaf.keys = keys[: cut - first]
        if not self._caching:
            return
        gone = keys[cut - first :]
        missing = [(at, key) for at, key in enumerate(gone) if key not in self.tier]
        slots = _slots_before(leaf, start, cut * self._block) if missing else _NO_SLOTS
        # What continues another block is forgotten before it.
        for at, key in reversed(missing):
            if (place := self.tier.add(key)) is not None:
                self._copy_out(key, slots[at * self._block : (at + 1) * self._block], place)
        for key in reversed(gone):
            if key in self.tier:
                self.tier.use(key)

    def swap_out(self, sequence: Sequence, slots: Slots) -> bool:
        """Keep what a sequence has computed until it comes back; False: there is no room.

        Args:
            sequence: gives way.
            slots: [n] of its first positions, whose tokens are known.
        """
        n = len(slots)
        if not n or not sequence.keep or sequence.scored:
            return False
        tokens = sequence.all_tokens(n)
        keys = self._keys(sequence, tokens, 0, n // self._block)
        if n % self._block:
            keys.append(self._tail_key(sequence, tokens))
        tier, missing = self.tier, [at for at, key in enumerate(keys) if key not in self.tier]
        there = [key for key in keys if key in tier]
        tier.pin(there)
        if len(missing) > tier.room:
            tier.unpin(there)
            return False
        for at in missing:
            place = tier.add(keys[at])
            assert place is not None
            tier.pin([keys[at]], private=not self._caching or (at + 1) * self._block > n)
            self._copy_out(keys[at], slots[at * self._block : (at + 1) * self._block], place)
        offloaded = _of(sequence)
        offloaded.kept, offloaded.swapped = keys, n
        self.swapped_tokens += n
        return True

    # -- in ------------------------------------------------------------------------------------

    def known(self, sequence: Sequence, cached: int) -> int:
        """Tokens that need not be computed, if the pool has the first `cached` ones."""
        return max(self._found(sequence, cached)[1], cached)

    def begin(self, sequence: Sequence, cached: int) -> None:
        """Find and pin what is there behind the first positions, which need not be computed."""
        offloaded = _of(sequence)
        offloaded.blocks, end = self._found(sequence, cached)
        offloaded.first, offloaded.end = cached // self._block, cached
        offloaded.to_fetch = max(end - cached, 0)
        if offloaded.to_fetch < (1 if offloaded.swapped else self._least):
            offloaded.blocks, offloaded.to_fetch = [], 0
        self.tier.pin(offloaded.blocks)
        if not sequence.began_at:
            sequence.cached += offloaded.to_fetch

    def withdraw(self, sequence: Sequence) -> None:
        """Undo `begin`: nothing is copied."""
        offloaded = _of(sequence)
        if not sequence.began_at:
            sequence.cached = sequence.shared
        self.tier.unpin(offloaded.blocks)
        offloaded.blocks, offloaded.to_fetch = [], 0

    def came_back(self, sequence: Sequence) -> None:
        """A sequence runs again, or has ended: `begin` has pinned what it needs."""
        offloaded = _of(sequence)
        self.tier.unpin(offloaded.kept)
        offloaded.kept, offloaded.swapped = [], 0

    def to_fetch(self, sequence: Sequence) -> int:
        """Tokens behind its computed ones that are to be copied from there."""
        return _of(sequence).to_fetch

    def fetch(self, sequence: Sequence, slots: Slots) -> None:
        """Copy what is there into slots, [to_fetch], with the step that is planned."""
        offloaded, start = _of(sequence), sequence.computed
        positions = np.arange(start, start + len(slots))
        where = np.array([self.tier.slot(key) for key in offloaded.blocks], np.int64)
        places = where[positions // self._block - offloaded.first] + positions % self._block
        self._in.append((places + self._first, slots))
        self.fetched_tokens += len(slots)
        offloaded.to_fetch, offloaded.end = 0, start + len(slots)
        self._busy += offloaded.blocks
        offloaded.blocks = []
        offloaded.flying = True
        sequence.in_flight += 1
        self._flying.append((self.step, sequence))

    @property
    def flying(self) -> bool:
        """Whether copies come in of which nobody knows that they have arrived."""
        return bool(self._flying)

    @property
    def issued(self) -> bool:
        """Whether no copies wait for a plan that comes in with them."""
        return not self._in

    def land(self, step: int) -> list[Sequence]:
        """The copies of steps up to this one have arrived, or are waited for by the next step.

        Returns whose they are.
        """
        landed = []
        while self._flying and self._flying[0][0] <= step:
            self._landed, sequence = self._flying.popleft()
            _of(sequence).flying = False
            sequence.in_flight -= 1
            landed.append(sequence)
        return landed

    # -- plans ---------------------------------------------------------------------------------

    def take(self) -> tuple[Slots, Slots, list[int]]:
        """What the next plan says: slots from and to, and how many steps ago copies were begun.

        The third one is of the newest copies that its rows rely on, if earlier plans have not said
        it.
        """
        copies = [*self._out, *self._in]
        self._out, self._in = [], []
        self.tier.unpin(self._busy)
        self._busy = []
        behind = [self.step - self._landed] if self._landed > self._told else []
        self._told = self._landed
        if not copies:
            return _NO_SLOTS, _NO_SLOTS, behind
        source, target = (np.concatenate(each) for each in zip(*copies, strict=True))
        return source, target, behind

    @property
    def counts(self) -> dict[str, int]:
        """What `Load` tells of this."""
        return {
            "swapped_tokens": self.swapped_tokens,
            "fetched_tokens": self.fetched_tokens,
            "offload_slots": self.tier.total,
            "offload_used_slots": self.tier.used,
        }

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless sequences have pinned what is pinned."""
        pins = Counter(self._busy)
        for offloaded in map(_of, sequences):
            pins.update(offloaded.blocks)
            pins.update(offloaded.kept)
        self.tier.check(pins)

    # -- parts ---------------------------------------------------------------------------------

    def _copy_out(self, key: Key, slots: Slots, place: int) -> None:
        self.tier.pin([key])
        self._busy.append(key)
        self._out.append((slots, np.arange(len(slots)) + place + self._first))

    def _found(self, sequence: Sequence, cached: int) -> tuple[list[Key], int]:
        """The blocks that are there from that of position `cached` on, and where they end."""
        usable = sequence.needed - 1
        swapped = _of(sequence).swapped
        if sequence.scored or not (self._caching or swapped) or usable <= cached:
            return [], 0
        first = cached // self._block
        found: list[Key] = []
        # Long prompts of which nothing is there are not hashed to their end.
        for at in range(first, sequence.needed // self._block):
            (key,) = self._keys(sequence, sequence.inputs, at, at + 1)
            if key not in self.tier:
                break
            found.append(key)
        end = (first + len(found)) * self._block
        if swapped % self._block and end == swapped - swapped % self._block:
            found.append(_of(sequence).kept[-1])
            end = swapped
        for key in reversed(found):
            self.tier.use(key)
        return found, min(end, usable)

    def _keys(self, sequence: Sequence, tokens: Tokens, first: int, end: int) -> list[Key]:
        """Keys of the blocks `first` to `end` of a sequence's tokens."""
        keys = _of(sequence).keys
        if not keys:
            keys.append(root_key(sequence.request.salt))
        for at in range(len(keys) - 1, end):
            keys.append(next_key(keys[-1], tokens[at * self._block : (at + 1) * self._block]))
        return keys[1 + first : 1 + end]

    def _tail_key(self, sequence: Sequence, tokens: Tokens) -> Key:
        """The key of what is left of these tokens behind whole blocks: no whole block has it."""
        whole = len(tokens) // self._block
        return next_key(_of(sequence).keys[whole], tokens[whole * self._block :])


def _of(sequence: Sequence) -> Offloaded:
    """What of a sequence lies there."""
    if sequence.offloaded is None:
        sequence.offloaded = Offloaded()
    return sequence.offloaded


def offload_of(limits: Limits) -> Offload | None:
    """For these limits; None: nothing goes to the host's memory."""
    if not limits.offload_slots:
        return None
    return Offload(
        limits.offload_slots,
        # The slot behind the pool's last one takes padding.
        first=limits.slots + PROBE_TOKENS + 1,
        caching=limits.caching,
        least=limits.offload_least,
        block=limits.offload_block,
    )


def _start(node: Node) -> int:
    """The position of a node's first token."""
    start, above = 0, node.parent
    while above is not None:
        start += len(above.tokens)
        above = above.parent
    return start


def _keys_of(node: Node, start: int, block: int) -> list[Key]:
    """Keys of the blocks of `block` tokens that end in a node, whose first token is at `start`.

    They are noted at each node on the way from its root. What is noted of a node that has been cut
    in two belongs to its lower end.
    """
    unknown: list[Node] = []
    each: Node | None = node
    while each is not None and not each.keys:
        unknown.append(each)
        each = each.parent
    assert each is not None, "a root without a key"
    key, at = each.keys[-1], start + len(node.tokens) - sum(len(n.tokens) for n in unknown)
    for below in reversed(unknown):
        end = at + len(below.tokens)
        tokens = _tokens_before(below, at % block)
        below.keys = []
        for first in range(0, (end // block - at // block) * block, block):
            key = next_key(key, tokens[first : first + block])
            below.keys.append(key)
        at = end
    ends = (start + len(node.tokens)) // block - start // block
    return node.keys[len(node.keys) - ends :]


def _tokens_before(node: Node, n: int) -> Tokens:
    """The last `n` tokens before a node, and its own."""
    parts, above = [node.tokens], node.parent
    while n and above is not None:
        taken = above.tokens[max(len(above.tokens) - n, 0) :]
        parts.append(taken)
        n -= len(taken)
        above = above.parent
    return np.concatenate(parts[::-1])


def _slots_before(node: Node, start: int, position: int) -> Slots:
    """The slots of a path from `position` on to the end of `node`, which begins at `start`."""
    parts, above = [node.slots], node.parent
    while start > position and above is not None:
        parts.append(above.slots)
        start -= len(above.slots)
        above = above.parent
    return np.concatenate(parts[::-1])[position - start :]
