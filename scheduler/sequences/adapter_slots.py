"""Which adapter is in which slot of the executors, and who uses it.

    read by all ranks --a request with it is admitted--> in a slot --its last sequence ends--> idle
                                                                        |
                        another needs the slot, and this one was idle longest

Adapters have numbers that are never used again, so a new version of one is another adapter: what
runs keeps the version that it began with. Adapters of virtual tokens need no slot: what they add
lies in the KV cache.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Set

from tokenpod.core.requests import Request
from tokenpod.scheduler.pool.radix import Slots
from tokenpod.scheduler.sequences.sequence import Sequence


def needs_slot(request: Request) -> bool:
    """Whether a request's adapter changes products of each step."""
    return request.adapter > 0 and not request.virtual_tokens


class AdapterSlots:
    """Slots 1 to total.

    Args:
        total: adapters that sequences with a row can have at once.
        known: numbers of adapters that all ranks have read.
        heads: so many of the slots, the first, have room for an embedding and a head, too.
        whole: those of the adapters that need it.
    """

    def __init__(
        self, total: int, known: Iterable[int] = (), heads: int = 0, whole: Iterable[int] = ()
    ) -> None:
        self.total, self.heads = total, heads
        self._whole = set(whole)
        self._known = set(known)
        #: Adapters that new requests are refused, and that go with their last sequence.
        self._retired: set[int] = set()
        #: Sequences that exist, waiting ones too, by adapter.
        self._users: Counter[int] = Counter()
        #: Admitted sequences by adapter; such an adapter stays in its slot.
        self._running: Counter[int] = Counter()
        #: The slot of each adapter that is in one, the longest unused first.
        self._slots: OrderedDict[int, int] = OrderedDict()
        #: Admitted sequences that have an adapter.
        self._holders: set[int] = set()
        #: KV slots that get ready-made keys and values with the next step: the adapter's number,
        #: and which of its virtual tokens. Each counts as a user.
        self._ready: dict[int, tuple[int, int]] = {}
        self._free = list(range(total, 0, -1))
        self._puts: list[tuple[int, int]] = []
        self._dropped: list[int] = []
        #: Whether anything is to be put into slots before the next step.
        self.pending = False

    # -- adapters ------------------------------------------------------------------------------

    def knows(self, adapter: int) -> bool:
        """Whether a request can have this adapter; 0 is none."""
        return not adapter or adapter in self._known

    def add(self, adapter: int, *, whole: bool = False) -> None:
        """All ranks have read an adapter; `whole`: it has an embedding or a head of its own."""
        self._known.add(adapter)
        if whole:
            self._whole.add(adapter)

    def retire(self, adapter: int) -> None:
        """No request gets this adapter any more; it is dropped once none has it."""
        self._known.discard(adapter)
        self._retired.add(adapter)
        self._drop_unused(adapter)

    def take_dropped(self) -> list[int]:
        """Retired adapters that nobody has any more, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    # -- sequences -----------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """A sequence exists."""
        if adapter := sequence.request.adapter:
            self._users[adapter] += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self.give_back(sequence)
        if adapter := sequence.request.adapter:
            self._users[adapter] -= 1
            self._drop_unused(adapter)

    @property
    def in_use(self) -> set[int]:
        """Adapters of admitted sequences."""
        return set(self._running)

    @property
    def in_used_slots(self) -> set[int]:
        """Those that have a slot."""
        return self._running.keys() & self._slots.keys()

    def fit(self, adapters: Set[int]) -> bool:
        """Whether there are slots for all of these; those in use are among them.

        Adapters without a head take slots with room for one when there are no others, or when they
        are there still.
        """
        others = adapters - self._whole
        there = sum(self._slots.get(each, self.total) <= self.heads for each in others)
        if self.heads == self.total:
            return len(adapters) <= self.total
        more = max(len(others) - there - (self.total - self.heads), 0)
        return len(adapters) - len(others) + there + more <= self.heads

    def give(self, sequence: Sequence) -> None:
        """Give an admitted sequence the slot of its adapter, which is put there if need be."""
        if not (adapter := sequence.request.adapter):
            return
        self._running[adapter] += 1
        self._holders.add(sequence.id)
        if not needs_slot(sequence.request):
            return
        if adapter not in self._slots:
            self._slots[adapter] = self._empty(adapter)
            self._puts.append((self._slots[adapter], adapter))
            self.pending = True
        self._slots.move_to_end(adapter)
        sequence.adapter_slot = self._slots[adapter]

    def give_back(self, sequence: Sequence) -> None:
        """A sequence runs no more, if it did."""
        if sequence.id not in self._holders:
            return
        self._holders.remove(sequence.id)
        sequence.adapter_slot = 0
        adapter = sequence.request.adapter
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]

    def take_puts(self) -> list[tuple[int, int]]:
        """Slots and adapters to be put there before the next step, since the last call."""
        # A slot that was taken again in between gets the last one only.
        puts, self._puts = dict(self._puts), []
        return list(puts.items())

    def fill(self, adapter: int, slots: Slots, first: int) -> None:
        """KV slots get an adapter's virtual tokens from number `first` on, with the next step."""
        for index, slot in enumerate(slots.tolist(), first):
            if slot in self._ready:  # what had it is gone, before any step
                self._users[self._ready[slot][0]] -= 1
            self._ready[slot] = adapter, index
        self._users[adapter] += len(slots)
        self.pending = True

    def take_ready(self, unfilled: Collection[int]) -> list[tuple[int, int, int]]:
        """Slots, adapters and indices to be filled before the next step, since the last call.

        `unfilled`: the slots of them that are not somebody else's by now.
        """
        ready, self._ready, self.pending = self._ready, {}, False
        for adapter, used in Counter(adapter for adapter, _ in ready.values()).items():
            self._users[adapter] -= used
            self._drop_unused(adapter)
        return [(slot, *token) for slot, token in ready.items() if slot in unfilled]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless each slot is free or has one adapter, used as counted."""
        taken = [*self._slots.values(), *self._free]
        assert sorted(taken) == list(range(1, self.total + 1)), taken
        there = list(sequences)
        running = Counter(s.request.adapter for s in there if s.id in self._holders)
        assert running == self._running, (running, self._running)
        for sequence in there:
            own = sequence.adapter_slot
            assert not own or self._slots[sequence.request.adapter] == own
        assert all(self._slots.get(each, 0) <= self.heads for each in self._whole), self._slots

    def _empty(self, adapter: int) -> int:
        if adapter in self._whole:
            found = self._among(range(1, self.heads + 1))
        else:
            found = self._among(range(self.heads + 1, self.total + 1))
            found = found or self._among(range(1, self.heads + 1))
        assert found, f"adapter {adapter} was admitted without a slot"
        return found

    def _among(self, slots: range) -> int:
        """A free one of these slots, or that whose adapter was idle longest; 0: none."""
        if free := [slot for slot in self._free if slot in slots]:
            self._free.remove(free[-1])
            return free[-1]
        for adapter, slot in self._slots.items():
            if slot in slots and not self._running[adapter]:
                return self._slots.pop(adapter)
        return 0

    def _drop_unused(self, adapter: int) -> None:
        if adapter not in self._retired or self._users[adapter]:
            return
        self._retired.remove(adapter)
        self._whole.discard(adapter)
        del self._users[adapter]
        if adapter in self._slots:
            slot = self._slots.pop(adapter)
            self._free.append(slot)
            self._puts = [put for put in self._puts if put[0] != slot]
        self._dropped.append(adapter)
