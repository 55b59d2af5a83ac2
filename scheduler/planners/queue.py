"""Requests that wait for a row and memory: callers' and a router's in one queue.

First come, first served within a priority, or short prompts first, with a bound on what passes a
longer one (order.py). The head waits until it fits; no request overtakes another that stands before
it, so none starves, and neither callers nor a router can keep the other out. A preempted sequence
keeps its number, and so stands before all that came later.

    waiting --a row is free, and the admission policy's ledger has room--> its planner
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice

from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.planners.order import Order
from tokenpod.scheduler.planners.planner import StepPlanner
from tokenpod.scheduler.policies.admission_policy import Admission
from tokenpod.scheduler.policies.batching import Joining
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.sequences.adapter_slots import AdapterSlots, needs_slot
from tokenpod.scheduler.sequences.constrained import Constrained
from tokenpod.scheduler.sequences.rows import Rows
from tokenpod.scheduler.sequences.sequence import Owner, Sequence, State

#: (-priority, number, stream of the first sample, samples): sorts in the order of service.
_Entry = tuple[int, int, int, list[Sequence]]

#: Less than any -priority: requests that stand before all others.
_FIRST = -(1 << 40)


def _place(entry: _Entry) -> tuple[int, int]:
    """Where an entry stands among those of other requests."""
    return entry[:2]


class Queue:
    """Requests without a row.

    Args:
        kv: has the cached prefixes.
        rows: the executor's rows.
        adapters: their slots.
        admission: says whether requests fit.
        order: of requests of one priority.
        swapped_first: what is swapped to the host's memory joins before all that waits.
    """

    def __init__(
        self,
        kv: KV,
        rows: Rows,
        adapters: AdapterSlots,
        admission: Admission,
        order: Order,
        *,
        swapped_first: bool = False,
    ) -> None:
        #: Tokens that waiting requests need computed.
        self.tokens = 0
        #: Those that wait for masks before they are queued.
        self.masks = Constrained()
        self._kv = kv
        self._rows = rows
        self._adapters = adapters
        self._admission = admission
        self._order = order
        self._swapped_first = swapped_first
        self._swapped = 0
        self._waiting: list[_Entry] = []
        #: How many of the batcher's at the head fitted when the next entry did not, and nothing has
        #: been freed since; None: that is to be looked at.
        self._fitted: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def swapped(self) -> int:
        """Entries of which the host's memory has what they had computed."""
        return self._swapped

    @property
    def may_admit(self) -> bool:
        """Whether somebody waits of whom it is not known that he does not fit."""
        return bool(self._waiting) and self._fitted != 0

    @property
    def head(self) -> list[Sequence]:
        """The samples of the request that is next; none if the queue is empty."""
        return self._waiting[0][-1] if self._waiting else []

    @property
    def of_batcher(self) -> Iterator[int]:
        """The tokens that each of the batcher's waiting requests needs computed, in order."""
        return (samples[0].needed for *_, samples in self._of_batcher())

    def add(self, samples: list[Sequence]) -> None:
        """Add a new request behind those of its priority; under a constraint once it has masks."""
        number = self._order.number(samples[0].needed)
        for sequence in samples:
            sequence.arrival = number
        self._wait(samples)

    def requeue(self, samples: list[Sequence]) -> None:
        """Take samples back that were admitted and have to begin anew, in their old place."""
        for sequence in samples:
            swapped = sequence.offloaded is not None and sequence.offloaded.swapped > 0
            sequence.state = State.SWAPPED if swapped else State.WAITING
            if sequence.request.adapter:
                self._adapters.give_back(sequence)
        self._wait(samples)
        self.freed()

    def masked(self, sequence_ids: Iterable[int], most: int | None = None) -> None:
        """The next masks of these sequences are there.

        Args:
            sequence_ids: theirs.
            most: sequences that go on at most; the others wait for the next call; None: all.
        """
        for samples in self.masks.masked(sequence_ids, most):
            self._insert(samples)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is about to end: it waits no more, if it did."""
        for samples in self.masks.forget(sequence) if sequence.constrained else ():
            if samples:
                self._insert(samples)
        if sequence.state is State.RUNNING:
            return
        place = self._place_of(sequence)
        at = bisect_left(self._waiting, place, key=_place)
        while at < len(self._waiting) and _place(self._waiting[at]) == place:
            samples = self._waiting[at][-1]
            if sequence in samples:
                samples.remove(sequence)
                if not samples:
                    del self._waiting[at]
                    self.tokens -= sequence.needed
                    self._swapped -= sequence.state is State.SWAPPED
                self._fitted = None
                return
            at += 1

    def _wait(self, samples: list[Sequence]) -> None:
        if samples[0].constrained:
            self.masks.hold(samples)
        else:
            self._insert(samples)

    def _insert(self, samples: list[Sequence]) -> None:
        first = samples[0]
        entry = (*self._place_of(first), first.stream, samples)
        insort(self._waiting, entry)
        self.tokens += first.needed
        self._swapped += first.state is State.SWAPPED
        if self._waiting[0] is entry or (self._fitted and self._waiting[-1] is not entry):
            self._fitted = None

    def freed(self) -> None:
        """Slots or a row are free again: the head may fit now."""
        self._fitted = None

    def admit(self, joining: Joining, planners: Iterable[StepPlanner]) -> None:
        """Hand over to their planners, in order, all that fit and that the batching policy wants.

        Args:
            joining: how many of the batcher's may join.
            planners: have what has been admitted.

        Many are asked for at once, and twice as many after that. A request more never lets more
        fit, so the first one that does not fit is found by bisection.
        """
        if not self._waiting or self._fitted == 0:
            return
        if len(self.head) > self._rows.free:
            self._fitted = 0
            return
        limit = self._limit(joining.most)
        if not limit or (self._fitted is not None and self._fitted < joining.least):
            return
        begun = self._begin_fitting(limit, planners)
        fitting = self._at_least(joining.least, begun)
        owners = [entry[-1][0].owner for entry in self._waiting[fitting:begun]]
        self._fitted = owners.count(Owner.BATCHER) if begun < limit else None
        for _, _, _, samples in self._waiting[:fitting]:
            first, *siblings = samples
            self.tokens -= first.needed
            self._swapped -= first.state is State.SWAPPED
            for sequence in samples:
                sequence.state = State.RUNNING
                if sequence.request.adapter:
                    self._adapters.give(sequence)
            if first.request.virtual_tokens:
                self._fill_virtual(first)
            self._rows.give(first)
            self._rows.promise(len(siblings))
            first.planner.start(samples)
        del self._waiting[:fitting]

    def _fill_virtual(self, sequence: Sequence) -> None:
        """Let a sequence begin behind the keys and values that its adapter has ready.

        Its ledger has counted them as tokens that must be there before it grows.
        """
        slots = self._kv.place_virtual(sequence)
        if len(slots):
            first = sequence.request.virtual_tokens - len(slots)
            self._adapters.fill(sequence.request.adapter, slots, first)

    def _place_of(self, sequence: Sequence) -> tuple[int, int]:
        first = self._swapped_first and sequence.state is State.SWAPPED
        return _FIRST if first else -sequence.request.priority, sequence.arrival

    def _of_batcher(self) -> Iterator[_Entry]:
        return (entry for entry in self._waiting if entry[-1][0].owner is Owner.BATCHER)

    def _limit(self, most: int | None) -> int:
        """Entries at the head with at most so many requests of the batcher."""
        beyond = None if most is None else next(islice(self._of_batcher(), most, None), None)
        return len(self._waiting) if beyond is None else self._waiting.index(beyond)

    def _at_least(self, least: int, fitting: int) -> int:
        """How many of the begun entries stay: all, or those before the batcher's first."""
        begun = self._waiting[:fitting]
        ours = [at for at, entry in enumerate(begun) if entry[-1][0].owner is Owner.BATCHER]
        if not ours or len(ours) >= least:
            return fitting
        self._withdraw(begun[ours[0] :])
        return ours[0]

    def _begin_fitting(self, limit: int, planners: Iterable[StepPlanner]) -> int:
        """Begin the first entries of the queue, as many as fit, at most `limit`; how many."""
        ledger, rows = Ledger(self._admission, self._kv.tree), self._rows.free
        for planner in planners:
            planner.add_to(ledger)
        #: In slots that are used, once one of these entries needs another.
        adapters: set[int] = set()
        is_full = False
        #: The ledger's mark after each of them.
        marks: list[int] = []

        def too_many(k: int) -> bool:
            return not ledger.fits(marks[k])

        fitting = 0
        while True:
            for _, _, _, samples in self._waiting[fitting : min(2 * fitting or 1, limit)]:
                rows -= len(samples)
                request = samples[0].request
                if request.adapter and needs_slot(request):
                    adapters = adapters or self._adapters.in_used_slots
                    adapters.add(request.adapter)
                is_full = rows < 0 or (bool(adapters) and not self._adapters.fit(adapters))
                if is_full:
                    break
                self._kv.begin(samples[0])
                ledger.joining(samples)
                marks.append(ledger.mark)
            if len(marks) == fitting:
                return fitting
            if too_many(-1):
                # The last one is known to be too many.
                asked = range(fitting, len(marks) - 1)
                fitting += bisect_left(asked, True, key=too_many)
                self._withdraw(self._waiting[fitting : len(marks)])
                return fitting
            fitting = len(marks)
            if is_full:
                return fitting

    def _withdraw(self, begun: list[_Entry]) -> None:
        """Undo the beginning of entries, the last one first."""
        for *_, samples in reversed(begun):
            self._kv.withdraw(samples[0])
