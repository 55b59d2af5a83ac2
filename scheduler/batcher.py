"""The in-pod batcher: plans the sequences of `Generate`.

    queue --admitted--> prefilling --needed positions launched--> decoding --> ended
      ^                                                              |
      |       siblings --the first sample's prompt settled--> ready--+
      |                                                              |
      +------- preempted: no row, no slots; computed again <---------+

Siblings wait for the prompt of the first sample; `ready` ones compute its last token only. The
batching policy decides what a step holds, the admission policy which sequences are preempted when
slots run out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tokenpod.scheduler.admission import Admission
from tokenpod.scheduler.batching import Batching
from tokenpod.scheduler.beams import Beams
from tokenpod.scheduler.decoding import Decoding
from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.forced import Forced
from tokenpod.scheduler.host_kv import HostKV
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.ledger import Ledger
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Group, Sequence
from tokenpod.scheduler.siblings import Siblings
from tokenpod.scheduler.step import StepBuilder
from tokenpod.scheduler.table import Ints


class Batcher:
    """Plans the sequences of `Generate`.

    Args:
        admission: decides which sequence is preempted.
        batching: decides what a step holds.
        requeue: takes samples that were admitted and have to begin anew.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
        swaps: whether what a preempted sequence has computed goes to the host's memory.
    """

    def __init__(
        self,
        kv: KV,
        rows: Rows,
        admission: Admission,
        batching: Batching,
        requeue: Callable[[list[Sequence]], None],
        forced: Forced,
        drafting: Drafting | None = None,
        *,
        swaps: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        #: Times that a decoding sequence had to pause for want of a slot.
        self.stalls = 0
        #: Times that a sequence was preempted.
        self.preemptions = 0
        self._kv = kv
        self._rows = rows
        self._admission = admission
        self._batching = batching
        self._requeue = requeue
        self._swaps = swaps
        self._prefilling: deque[Sequence] = deque()
        #: Samples whose prompt is in the tree but for its last token; before all of `_prefilling`.
        self._ready: deque[Sequence] = deque()
        #: Samples that wait for the prompt of the first.
        self._siblings = Siblings(rows)
        self._decoding = Decoding(kv.table, forced, drafting)
        #: Ended, but with a step in flight, so that their slots are not free yet.
        self._leaving: dict[int, Sequence] = {}
        #: Searches whose prompts have been launched.
        self._beams = Beams(kv, rows)
        #: The same for preempted ones.
        self._vacating: dict[int, Sequence] = {}

    @property
    def running(self) -> int:
        """Admitted sequences."""
        queued = len(self._siblings) + len(self._ready) + len(self._prefilling)
        decoding = len(self._decoding) + self._beams.running
        return queued + decoding + len(self._vacating)

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are to be computed."""
        return bool(self._ready) or any(not s.hosted.flying for s in self._prefilling)

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompt is being computed, or is next."""
        return list(self._prefilling)

    def holds_only(self, places: Ints) -> bool:
        """Whether the sequences at these places decode, and there are no others."""
        if self._leaving or self._vacating or self._siblings or self._ready or self._prefilling:
            return False
        return self._decoding.holds_only(places)

    def start(self, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        first, *siblings = samples
        if self._kv.host is not None:
            self._kv.host.came_back(first)
        self._prefilling.append(first)
        self._siblings.add(first, siblings)

    def enter(self, ledger: Ledger, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        first, *siblings = samples
        ledger.prefilling(first)
        if siblings:
            ledger.siblings(first, siblings)

    def add_to(self, ledger: Ledger) -> None:
        """Add what these sequences need."""
        self._decoding.enter(ledger)
        self._beams.add_to(ledger)
        ledger.leaving([*self._leaving.values(), *self._vacating.values()])
        for sequence in self._ready:
            ledger.prefilling(sequence)
        for first, siblings in self._siblings.by_first:
            computed = self._decoding.get(first) or self._vacating.get(first)
            computed = computed or self._beams.first(first)
            if computed is not None:
                ledger.siblings(computed, siblings)
        for sequence in self._prefilling:
            self.enter(ledger, [sequence, *self._siblings.of(sequence)])

    def plan(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add to a step.

        Args:
            step: has the rows of routers already.
            prompt_tokens: left of the step's budget.
            slots: that may be taken. Too few are never left under exact admission.
        """
        portion = self._batching.portion(prompts=self.has_prompts, prompt_tokens=prompt_tokens)
        beams = self._beams.wanted if portion.decode else 0
        sequences, places = self._decoding.next() if portion.decode else ([], _NONE)
        if len(sequences) + beams + self.has_prompts > slots:
            slots = self._make_room(slots, decode=portion.decode)
            sequences, places = self._decoding.next() if portion.decode else ([], _NONE)
        # Before the others: these can be preempted.
        searched = self._beams.plan(step, slots) if beams else 0
        slots -= searched
        if len(sequences) > slots:
            self.stalls += max(len(sequences) - slots, 0)
            sequences, places = sequences[:slots], places[:slots]
        ahead = self._may_run_ahead(slots)
        decoded = self._decoding.add_to(step, sequences, places, ahead=ahead)
        slots -= decoded
        if searched or decoded:
            self._batching.decoded()
        if self._kv.host is not None:
            slots = self._fetch(step, slots, self._kv.host)
        self._compute(step, portion.prompt_tokens, slots)

    def inputs_proven(self, sequence: Sequence) -> None:
        """The first output after a sequence's needed positions has settled: publish these.

        Samples that have waited for its prompt can begin.
        """
        sequence.proven = True
        siblings = self._siblings.take(sequence)
        self._kv.publish_inputs(sequence, awaited=bool(siblings))
        for sibling in siblings:
            self._kv.follow(sibling, sequence)
            self._rows.give(sibling)
            self._ready.append(sibling)

    def branched(self, group: Group, parents: dict[Sequence, Sequence]) -> None:
        """A step of a search has settled: which sequence goes on from which."""
        if not group.begun:
            group.first.proven = True
            self._kv.publish_inputs(group.first, awaited=True)
            self._beams.begin(group, self._siblings.take(group.first))
        self._beams.continue_with(group, parents)

    def preempt(self, sequence: Sequence) -> bool:
        """Take row and slots from a running sequence, which goes back to its place in the queue.

        If it has a step in flight, that happens when the step has settled: its token counts.
        Returns False if it is not running here.
        """
        if not self._take_out(sequence):
            return False
        self.preemptions += 1
        if sequence.in_flight:
            self._vacating[sequence.id] = sequence
        else:
            self._vacate(sequence)
        return True

    def settled(self) -> None:
        """A step has settled: preempted sequences that were in it begin anew."""
        for sequence in [*self._vacating.values()]:
            if not sequence.in_flight:
                del self._vacating[sequence.id]
                self._vacate(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended; its slots stay with it until `released`."""
        if sequence.row < 0:
            self._siblings.remove(sequence)
        elif (
            sequence.id in self._vacating
            or self._take_out(sequence)
            or self._beams.remove(sequence)
        ):
            self._vacating.pop(sequence.id, None)
            if siblings := self._siblings.take(sequence):
                # The prompt that they wait for may never come.
                self._requeue(siblings)
            self._leaving[sequence.id] = sequence

    def released(self, sequence: Sequence) -> None:
        """A sequence's slots and row are free."""
        self._leaving.pop(sequence.id, None)

    # -- steps ---------------------------------------------------------------------------------

    def _may_run_ahead(self, slots: int) -> bool:
        """Whether sequences may have drafts, and so slots sooner than admission has counted.

        Others may not have ended by then. So all must be able to have theirs up to their bounds,
        in whatever order. (Nor are there drafts beside beams, which are counted otherwise.)
        """
        wanted = self._decoding.may_run_ahead and not self._beams.running
        return wanted and self._to_come <= slots

    @property
    def _to_come(self) -> int:
        """Slots that all of these sequences may still take, up to their bounds."""
        to_come = self._decoding.to_come + self._beams.to_come
        to_come += sum(each.bound - each.computed for each in (*self._ready, *self._prefilling))
        return to_come + sum(each.bound - each.needed + 1 for each in self._siblings)

    def _compute(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add pieces of prompts, in the order of admission."""
        budget = min(prompt_tokens, slots)
        for sequence in [*self._ready, *self._prefilling] if budget > 0 else []:
            if sequence.hosted.late:
                continue
            if budget <= 0:
                break
            n = min(sequence.to_compute, budget)
            step.prompt(sequence, n)
            budget -= n
            if not sequence.prefilling:
                line = self._ready if self._ready else self._prefilling
                line.remove(sequence)
                if sequence.group is not None:
                    self._beams.add(sequence.group)
                    continue
                self._decoding.add(sequence)

    def _fetch(self, step: StepBuilder, slots: int, host: HostKV) -> int:
        """Begin copies from the host's memory, in the order of admission; the slots that are left.

        For whom there are too few slots, it is computed, piece by piece. One slot is left: nothing
        may run but what waits for copies.
        """
        for sequence in self._prefilling:
            n = sequence.hosted.to_fetch
            if n >= slots:
                host.withdraw(sequence)
            elif n:
                self._rows.renew(sequence)
                step.fetch(sequence)
                slots -= n
        return slots

    def lacks_room(self, slots: int) -> bool:
        """Whether somebody has to give way for the next token of all, with so many slots."""
        return self._wanted(decode=True) > slots

    def _wanted(self, *, decode: bool) -> int:
        """Slots for the next token of all that decode, if they do, and for one of a prompt."""
        decoding = len(self._decoding.next()[0]) + self._beams.wanted
        return decoding * decode + self.has_prompts

    def _make_room(self, slots: int, *, decode: bool) -> int:
        """Preempt until every row has a slot, or the admission policy names no victims.

        Slots of sequences with a step in flight come free too late for this step, but count.
        Returns the slots that may be taken now.
        """
        coming = 0
        while running := [*self._decoding, *self._ready, *self._prefilling]:
            if self._wanted(decode=decode) <= slots + coming:
                break
            victims = self._admission.victims(running)
            if not victims:
                break
            for victim in victims:
                before, private = self._kv.available, victim.private
                coming += private if victim.in_flight else 0
                self.preempt(victim)
                slots += self._kv.available - before
        return max(slots, 0)

    # -- who is where --------------------------------------------------------------------------

    def _take_out(self, sequence: Sequence) -> bool:
        """Take a sequence with a row out of those that are planned; False if it is not there."""
        if self._decoding.remove(sequence):
            return True
        for line in (self._ready, self._prefilling):
            if sequence in line:
                line.remove(sequence)
                return True
        return False

    def _vacate(self, sequence: Sequence) -> None:
        """Free row and slots of a preempted sequence, and queue it again."""
        siblings = self._siblings.take(sequence)
        # One whose samples wait for its prompt has no output to lose yet.
        if self._kv.host is not None and not siblings and self._swaps(sequence):
            self._kv.swap_out(sequence)
        self._kv.release(sequence)
        self._rows.give_back(sequence)
        sequence.restart()
        self._requeue([sequence, *siblings])


_NONE: Ints = np.empty(0, np.int64)
