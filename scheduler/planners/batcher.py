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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, compress

import numpy as np

from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.drafts.forced import Forced
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.offload import Offload
from tokenpod.scheduler.kv.preemption import Preemption
from tokenpod.scheduler.planners.beam_steps import Beams
from tokenpod.scheduler.planners.planner import add_decoding
from tokenpod.scheduler.planners.queue import Queue
from tokenpod.scheduler.policies.admission_policy import Admission
from tokenpod.scheduler.policies.batching import Batching, Joining
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.sequences.rows import Rows
from tokenpod.scheduler.sequences.sequence import Group, Planner, Sequence
from tokenpod.scheduler.sequences.table import Ints, Table, places_of
from tokenpod.scheduler.steps.step import Step, StepBuilder

_NONE: Ints = np.empty(0, np.int64)
#: After more changes than this the places of decoding sequences are gathered anew.
_MANY = 16


class Batcher(Planner):
    """Plans the sequences of `Generate`.

    Args:
        kv: of the scheduler, as the next two.
        rows: of the executor.
        queue: takes samples back that were admitted and have to begin anew.
        admission: decides which sequence is preempted.
        batching: decides what a step holds.
        preemption: decides what of a preempted sequence goes to the host's memory.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
        ahead: prompt tokens of those that have left the queue, about: more stay there, whose order
            may still change; None: all join that fit.
    """

    def __init__(
        self,
        kv: KV,
        rows: Rows,
        queue: Queue,
        *,
        admission: Admission,
        batching: Batching,
        preemption: Preemption,
        forced: Forced,
        drafting: Drafting | None,
        whole_prompts: bool = False,
        ahead: int | None = None,
    ) -> None:
        #: A prompt is computed in one step.
        self._whole_prompts = whole_prompts
        #: Times that a sequence was preempted.
        self.preemptions = 0
        self._kv = kv
        self._rows = rows
        self._queue = queue
        self._admission = admission
        self._batching = batching
        self._preemption = preemption
        self._forced = forced
        self._drafting = drafting
        self._ahead = ahead
        self._prefilling: deque[Sequence] = deque()
        #: Samples whose prompt is in the tree but for its last token; before all of `_prefilling`.
        self._ready: deque[Sequence] = deque()
        #: Samples that wait for the prompt of the first, by its id; each is promised a row.
        self._siblings: dict[int, list[Sequence]] = {}
        self._decoding = _Decoding(kv.table, drafts=drafting is not None)
        #: Searches whose prompts have been launched.
        self._beams = Beams(kv, rows)
        #: Ended, but with a step in flight, so that their slots are not free yet.
        self._leaving: dict[int, Sequence] = {}
        #: The same for preempted ones.
        self._vacating: dict[int, Sequence] = {}

    # -- who is here ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Admitted sequences."""
        queued = sum(map(len, self._siblings.values())) + len(self._ready) + len(self._prefilling)
        searching = self._beams.running if self._beams.groups else 0
        return queued + len(self._decoding) + searching + len(self._vacating)

    @property
    def has_prompts(self) -> bool:
        """Whether prompt tokens are to be computed."""
        return bool(self._ready) or any(not s.fetching for s in self._prefilling)

    @property
    def decoding(self) -> tuple[int, int]:
        """Sequences that can have a token in the next step; the tokens that they read together."""
        _, places = self._decoding.next()
        rows, context = len(places), int(self._kv.table.computed[places].sum())
        if self._beams.groups:
            rows += self._beams.wanted
            context += self._beams.context
        return rows, context

    @property
    def prompts(self) -> Iterator[tuple[int, int]]:
        """Of each prompt, in order: tokens that are computed, and those that are to be."""
        for sequence in chain(self._ready, self._prefilling):
            if not sequence.late:
                yield sequence.computed, sequence.to_compute

    @property
    def prefilling(self) -> list[Sequence]:
        """Sequences whose prompt is being computed, or is next."""
        return list(self._prefilling)

    def holds_only(self, places: Ints) -> bool:
        """Whether the sequences at these places decode, and there are no others."""
        if self._leaving or self._vacating or self._siblings or self._ready or self._prefilling:
            return False
        return self._decoding.holds_only(places)

    def joining(self, waiting: Iterable[int]) -> Joining:
        """How many requests may join, given the tokens that each which waits needs computed."""
        if self._ahead is None:
            return self._batching.joining(self.running, waiting)
        wanted = [*self._wanted_next(waiting, self._ahead)]
        joining = self._batching.joining(self.running, wanted)
        most = len(wanted) if joining.most is None else min(joining.most, len(wanted))
        return replace(joining, most=most)

    def _wanted_next(self, waiting: Iterable[int], ahead: int) -> Iterator[int]:
        """The first of those that wait: so many tokens with the prompts that are being computed."""
        ahead -= sum(to_compute for _, to_compute in self.prompts)
        for tokens in waiting:
            if ahead <= 0:
                return
            ahead -= tokens
            yield tokens

    def add_to(self, ledger: Ledger) -> None:
        """Add what its sequences need to a ledger."""
        ledger.decoding(*self._decoding.all())
        if self._beams.groups:
            self._beams.add_to(ledger)
        ledger.leaving([*self._leaving.values(), *self._vacating.values()])
        for sequence in self._ready:
            ledger.prefilling(sequence)
        for first, siblings in self._siblings.items():
            computed = self._decoding.get(first) or self._vacating.get(first)
            computed = computed or self._beams.first(first)
            if computed is not None:
                ledger.siblings(computed, siblings)
        for sequence in self._prefilling:
            ledger.joining([sequence, *self._siblings.get(sequence.id, ())])

    def start(self, samples: list[Sequence]) -> None:
        """Take over a request that has been admitted."""
        first, *siblings = samples
        if self._kv.offload is not None:
            self._kv.offload.came_back(first)
        self._prefilling.append(first)
        if siblings:
            self._siblings[first.id] = siblings

    # -- steps ---------------------------------------------------------------------------------

    def next_rows(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add its rows to the next step: slots are never too few under exact admission."""
        prompts = self.has_prompts and step.takes_prompts
        portion = self._batching.portion(prompts=prompts, prompt_tokens=prompt_tokens)
        beams = self._beams.wanted if portion.decode and self._beams.groups else 0
        sequences, places = self._decoding.next() if portion.decode else ([], _NONE)
        if len(sequences) + beams + self._least_prompt > slots:
            slots = self._make_room(slots, decode=portion.decode)
            sequences, places = self._decoding.next() if portion.decode else ([], _NONE)
        # Before the others: these can be preempted.
        searched = self._beams.plan(step, slots) if beams else 0
        slots -= searched
        if len(sequences) > slots:
            sequences, places = sequences[:slots], places[:slots]
        decoded = self._decode(step, sequences, places, slots)
        slots -= decoded
        if searched or decoded:
            self._batching.decoded()
        if self._kv.offload is not None:
            slots = self._fetch(step, slots, self._kv.offload)
        if step.takes_prompts:
            self._compute(step, portion.prompt_tokens, slots)

    def inputs_settled(self, sequence: Sequence) -> None:
        """Samples that have waited for its prompt can begin."""
        siblings = self._take_siblings(sequence)
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
            self._beams.begin(group, self._take_siblings(group.first))
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

    def settle(self, step: Step | None) -> None:
        """Preempted sequences that were in the step begin anew."""
        del step
        for sequence in [*self._vacating.values()]:
            if not sequence.in_flight:
                del self._vacating[sequence.id]
                self._vacate(sequence)

    def drop(self, sequence: Sequence) -> None:
        """An admitted sequence has ended: plan nothing more of it."""
        if sequence.row < 0:
            self._forget_sibling(sequence)
        elif (
            sequence.id in self._vacating
            or self._take_out(sequence)
            or self._beams.remove(sequence)
        ):
            self._vacating.pop(sequence.id, None)
            if siblings := self._take_siblings(sequence):
                # The prompt that they wait for may never come.
                self._queue.requeue(siblings)
            self._leaving[sequence.id] = sequence

    def released(self, sequence: Sequence) -> None:
        """Forget a sequence whose slots and row are free."""
        self._leaving.pop(sequence.id, None)

    # -- parts of steps ------------------------------------------------------------------------

    def _decode(
        self, step: StepBuilder, sequences: list[Sequence], places: Ints, slots: int
    ) -> int:
        """Add the next tokens of these, and what may follow; the slots taken, of so many."""
        if self._may_run_ahead(slots):
            return add_decoding(step, sequences, places, self._forced, self._drafting)
        if sequences:
            step.decode(sequences, places)
        return len(sequences)

    def _may_run_ahead(self, slots: int) -> bool:
        """Whether sequences may have drafts, and so slots sooner than admission has counted.

        Others may not have ended by then. So all must be able to have theirs up to their bounds,
        in whatever order. (Nor are there drafts beside beams, which are counted otherwise.)
        """
        wanted = (self._drafting or self._forced.known) and not self._beams.groups
        return bool(wanted) and self._to_come <= slots

    @property
    def _to_come(self) -> int:
        """Slots that all of these sequences may still take, up to their bounds."""
        to_come = self._decoding.to_come + self._beams.to_come
        to_come += sum(each.bound - each.computed for each in (*self._ready, *self._prefilling))
        siblings = chain.from_iterable(self._siblings.values())
        return to_come + sum(each.bound - each.needed + 1 for each in siblings)

    def _compute(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add pieces of prompts, in the order of admission."""
        budget, begun = min(prompt_tokens, slots), False
        for sequence in [*self._ready, *self._prefilling] if budget > 0 else []:
            if sequence.late:
                continue
            if budget <= 0:
                break
            n = min(sequence.next_piece, budget)
            if self._whole_prompts and n < sequence.next_piece:
                break
            if n < (least := sequence.least_piece):
                # First in a step it may be longer than the others: it can't be cut.
                if begun or least > min(slots, step.prompt_room):
                    break
                n = least
            step.prompt(sequence, n)
            budget, begun = budget - n, True
            if not sequence.prefilling:
                line = self._ready if self._ready else self._prefilling
                line.remove(sequence)
                if sequence.group is not None:
                    self._beams.add(sequence.group)
                    continue
                self._decoding.add(sequence)

    def _fetch(self, step: StepBuilder, slots: int, offload: Offload) -> int:
        """Begin copies from the host's memory, in the order of admission; the slots that are left.

        For whom there are too few slots, it is computed, piece by piece. One slot is left: nothing
        may run but what waits for copies.
        """
        for sequence in self._prefilling:
            n = offload.to_fetch(sequence)
            if n >= slots:
                offload.withdraw(sequence)
            elif n:
                self._rows.renew(sequence)
                step.fetch(sequence)
                slots -= n
        return slots

    def lacks_room(self, slots: int) -> bool:
        """Whether somebody has to give way for the next token of all, with so many slots."""
        return self._wanted(decode=True) > slots

    def _wanted(self, *, decode: bool) -> int:
        """Slots for the next token of all that decode, if they do, and for a piece of a prompt."""
        decoding = len(self._decoding.next()[0])
        if self._beams.groups:
            decoding += self._beams.wanted
        return decoding * decode + self._least_prompt

    @property
    def _least_prompt(self) -> int:
        """Slots that the next prompt takes at least; 0: there is none."""
        prompts = chain(self._ready, self._prefilling)
        return next((s.least_piece for s in prompts if not s.late), int(self.has_prompts))

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
        siblings = self._take_siblings(sequence)
        # One whose samples wait for its prompt has no output to lose yet.
        if self._kv.offload is not None and not siblings and self._preemption.swaps(sequence):
            self._kv.swap_out(sequence)
        self._kv.release(sequence)
        self._rows.give_back(sequence)
        sequence.restart()
        self._queue.requeue([sequence, *siblings])

    def _take_siblings(self, first: Sequence) -> list[Sequence]:
        """Those that wait for the prompt of `first`, and no longer: they are promised no rows."""
        siblings = self._siblings.pop(first.id, [])
        self._rows.promise(-len(siblings))
        return siblings

    def _forget_sibling(self, sequence: Sequence) -> None:
        for first, siblings in self._siblings.items():
            if sequence in siblings:
                siblings.remove(sequence)
                self._rows.promise(-1)
                if not siblings:
                    del self._siblings[first]
                return


class _Decoding:
    """The batcher's sequences whose needed positions have all been launched, but for beams.

    They go in lockstep, so most steps hold all of them, one position each: a few operations on
    columns. Left out are those whose last token has been launched, whose mask is late, or whose
    drafts are being checked.

    Args:
        table: their columns.
        drafts: whether any may have drafts.
    """

    def __init__(self, table: Table, *, drafts: bool) -> None:
        self._table = table
        self._drafts = drafts
        self._sequences: dict[int, Sequence] = {}
        #: The same in the order in which they came, and [n] their places; never changed in place.
        self._order: list[Sequence] = []
        self._places = _NONE
        #: Who came and who went since these were made.
        self._came: list[Sequence] = []
        self._gone: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, sequence_id: int) -> Sequence | None:
        """One of them by its id."""
        return self._sequences.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        """The last of what a sequence needs has been planned."""
        self._sequences[sequence.id] = sequence
        self._came.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Plan nothing more of a sequence; False if it is not here."""
        if self._sequences.pop(sequence.id, None) is None:
            return False
        if sequence in self._came:
            self._came.remove(sequence)
        else:
            self._gone.append(sequence)
        return True

    @property
    def to_come(self) -> int:
        """Slots that they may still take, up to their bounds."""
        _, places = self.all()
        return int((self._table.bound[places] - self._table.computed[places]).sum())

    def next(self) -> tuple[list[Sequence], Ints]:
        """Those that can have a token in the next step; [n] their places."""
        sequences, places = self.all()
        table = self._table
        going_on = table.computed[places] < table.bound[places]
        if table.constrained:
            going_on &= table.paused[places] == 0
        if self._drafts:  # which of them are right must be known first
            going_on &= table.drafted[places] == 0
        if np.count_nonzero(going_on) == len(going_on):
            return sequences, places
        return [*compress(sequences, going_on.tolist())], places[going_on]

    def all(self) -> tuple[list[Sequence], Ints]:
        """All of them; [n] their places."""
        came, gone = self._came, self._gone
        if not (came or gone):
            return self._order, self._places
        if len(came) + len(gone) > _MANY:
            self._order = [*self._sequences.values()]
            self._places = places_of(self._order)
        else:
            which = [self._order.index(sequence) for sequence in gone]
            stay = np.ones(len(self._order), np.bool_)
            stay[which] = False
            self._order = [*compress(self._order, stay.tolist()), *came]
            self._places = np.concatenate((self._places[stay], places_of(came)))
        came.clear()
        gone.clear()
        return self._order, self._places

    def holds_only(self, places: Ints) -> bool:
        """Whether the sequences at these places are all that there are, and can have a token."""
        sequences, decoding = self.next()
        return len(sequences) == len(self) == len(places) and set(decoding.tolist()) == set(
            places.tolist()
        )
