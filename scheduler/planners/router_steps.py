"""Plans a router's sequences, which are stepped only when the router says so.

An `Advance` that resumes streams is one step of the engine: streams must not stall for the prompts
that join them, which get what is left of the step's prompt budget, shared with the batcher's. An
`Advance` of new prompts alone takes as many steps as they need. Sequences that still wait for a row
have no part in it. Where the sequences of several overlap, these run one after the other.

    members of an Advance:  no row yet, copies under way, no budget ----> named in its answer
                            with a row: owed tokens --planned, settled--> nothing owed

A router's sequences have their whole bound reserved and are never preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenpod.core.messages import PROBE_TOKENS, Advance
from tokenpod.core.outputs import Advanced
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.drafts.forced import Forced
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.offload import Offload
from tokenpod.scheduler.planners.planner import add_decoding
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.sequences.rows import Rows
from tokenpod.scheduler.sequences.sequence import Owner, Planner, Sequence, State
from tokenpod.scheduler.sequences.table import places_of
from tokenpod.scheduler.steps.step import Step, StepBuilder


@dataclass(slots=True)
class _Op:
    id: int
    #: All sequences that it names and that have not ended, by id.
    members: dict[int, Sequence]
    #: Prompt tokens to process at most, of some of them.
    chunks: dict[int, int]
    #: It resumes streams: it is one step.
    single: bool
    #: It is answered once a sequence has been stepped, not before.
    waits: bool
    #: Members that did not get all that was asked for: no row, or not enough budget.
    waiting: list[int] = field(default_factory=list)
    #: Members with a row that have tokens to be planned or settled.
    open: dict[int, Sequence] = field(default_factory=dict)
    #: Whether a member has been stepped; those whose masks were late have not.
    stepped: bool = False
    #: Tokens of each of them that are yet to be planned.
    owed: dict[int, int] = field(default_factory=dict)
    begun: bool = False

    @property
    def done(self) -> bool:
        return not self.members or (self.begun and not self.open)


class RouterSteps(Planner):
    """Plans the sequences of Prefill and Decode.

    Args:
        kv: of the scheduler.
        rows: of the executor.
        forced: which tokens are forced.
        drafting: decides who has drafts; None: nobody.
    """

    owner = Owner.ROUTER

    def __init__(self, kv: KV, rows: Rows, forced: Forced, drafting: Drafting | None) -> None:
        self._kv = kv
        self._rows = rows
        self._forced = forced
        self._drafting = drafting
        self.ops: list[_Op] = []
        #: Slots that sequences with a row may still take, up to their bounds.
        self.reserved = 0
        #: Sequences that wait for a row.
        self._waiting: dict[int, Sequence] = {}
        #: Sequences with a row, by id.
        self.admitted: dict[int, Sequence] = {}

    @property
    def waiting_tokens(self) -> int:
        """Slots that sequences without a row may come to need."""
        return sum(sequence.bound for sequence in self._waiting.values())

    def start(self, samples: list[Sequence]) -> None:
        """Take over a request that has been admitted."""
        (sequence,) = samples
        self.admitted[sequence.id] = self._waiting.pop(sequence.id)
        self.reserved += sequence.bound - sequence.computed

    @property
    def decoding(self) -> tuple[int, int]:
        """Sequences that routers want a token of; the tokens that these read together."""
        members = (sequence for op in self.ops for sequence in op.members.values())
        wanted = [sequence.computed for sequence in members if not sequence.prefilling]
        return len(wanted), sum(wanted)

    def add_to(self, ledger: Ledger) -> None:
        """Add what its sequences need to a ledger."""
        for sequence in self.admitted.values():
            ledger.reserved(sequence)

    def begin(self, op: Advance, fresh: list[Sequence], resumed: list[Sequence]) -> None:
        """Queue a step of new sequences, which wait in the queue, and of earlier ones."""
        self._waiting |= {sequence.id: sequence for sequence in fresh}
        chunks = {s.id: n for s, n in zip(fresh, op.start_chunks, strict=True) if n}
        members = {sequence.id: sequence for sequence in (*fresh, *resumed)}
        self.ops.append(_Op(op.op, members, chunks, bool(resumed), op.waits))

    def next_rows(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """What routers have asked for, in slots that are theirs already."""
        del slots
        taken: set[int] = set()
        decoding: list[Sequence] = []
        for op in self.ops:
            if taken.isdisjoint(op.members):
                prompt_tokens -= self._plan_op(op, prompt_tokens, step, decoding)
            if not op.done:
                taken |= op.members.keys()
        if decoding:
            # Together: who has drafts is decided among all of a step.
            places = places_of(decoding)
            self.reserved -= add_decoding(step, decoding, places, self._forced, self._drafting)

    def settle(self, step: Step | None) -> None:
        """A step has settled."""
        if step is not None and self.ops:
            for sequence in step.sequences:
                self._settle_row(sequence)

    def answers(self) -> list[Advanced]:
        """Answers to the `Advance`s that are complete since the last call."""
        done = [op for op in self.ops if op.done]
        if done:
            self.ops = [op for op in self.ops if not op.done]
        return [_answer(op) for op in done]

    def names(self, sequence: Sequence) -> bool:
        """Whether a step that is asked for names a sequence: only then can its end be told."""
        return any(sequence.id in op.members for op in self.ops)

    def inputs_settled(self, sequence: Sequence) -> None:
        """Publish what the sequence needed: its first output has settled."""
        self._kv.publish_inputs(sequence, awaited=False)

    def unsampled(self, sequence: Sequence, n: int) -> None:
        """Expect the tokens again that a late mask has cost."""
        self.taken_back(sequence, n)
        for op in self.ops:
            if sequence.id in op.open:
                op.waiting.append(sequence.id)

    def taken_back(self, sequence: Sequence, n: int) -> None:
        """Expect the last positions again."""
        if sequence.id in self.admitted:
            self.reserved += n

    def released(self, sequence: Sequence) -> None:
        """Forget a sequence whose slots and row are free."""
        self._waiting.pop(sequence.id, None)
        if self.admitted.pop(sequence.id, None):
            self.reserved -= sequence.bound - sequence.computed
        for op in self.ops:
            op.members.pop(sequence.id, None)
            op.open.pop(sequence.id, None)

    def check(self) -> None:
        """Raise AssertionError unless what is reserved is what its sequences may take."""
        promised = sum(sequence.bound - sequence.computed for sequence in self.admitted.values())
        assert promised == self.reserved, (promised, self.reserved)

    def _settle_row(self, sequence: Sequence) -> None:
        for op in self.ops:
            if sequence.id in op.open and not sequence.in_flight and not op.owed[sequence.id]:
                del op.open[sequence.id]
                op.stepped |= sequence.id not in op.waiting
                if op.waits and not (op.open or op.stepped):
                    # All came too late: the answer waits for the first of their masks.
                    op.begun = False

    def _plan_op(self, op: _Op, budget: int, step: StepBuilder, decoding: list[Sequence]) -> int:
        """Add the tokens of prompts that an `Advance` has open; how many they are.

        `decoding`: is extended by those of its sequences that decode.
        """
        if op.begun and op.single:
            return 0
        if not op.begun:
            if self._kv.offload is not None:
                self._fetch(op, step, self._kv.offload)
            self._begin(op)
        planned: dict[int, Sequence] = {}
        left = budget
        for sequence in op.open.values():
            owed = op.owed[sequence.id]
            if not owed or sequence.dead:
                continue
            if not sequence.prefilling:
                decoding.append(sequence)
                n = 1
            elif left > 0:
                n = min(owed, left, sequence.next_piece)
                if n < (least := sequence.least_piece):
                    if left < budget or least > step.prompt_room:
                        continue
                    n = least
                step.prompt(sequence, n)
                left -= n
            else:
                continue
            planned[sequence.id] = sequence
            op.owed[sequence.id] -= n
        self.reserved -= budget - left
        # Nothing but what waits for copies: these take milliseconds.
        copied = any(sequence.late for sequence in op.members.values())
        op.begun = bool(planned) or op.begun or not (op.waits or copied)
        if op.single and op.begun:
            self._end_after(op, planned)
        return budget - left

    def _fetch(self, op: _Op, step: StepBuilder, offload: Offload) -> None:
        """Have copied what the host's memory has of members with a row."""
        for sequence in op.members.values():
            n = offload.to_fetch(sequence)
            if n and sequence.id in self.admitted and not sequence.dead:
                self.reserved -= n
                self._rows.renew(sequence)
                step.fetch(sequence)

    def _begin(self, op: _Op) -> None:
        """Find the members that can have a part in a step; repeated until there is one."""
        ready = {
            i: sequence
            for i, sequence in op.members.items()
            if i in self.admitted and not (sequence.paused or sequence.late)
        }
        op.waiting = [i for i in op.members if i not in ready]
        op.owed = {i: _promised(sequence, op.chunks.get(i, 0)) for i, sequence in ready.items()}
        op.open = {i: sequence for i, sequence in ready.items() if op.owed[i]}

    def _end_after(self, op: _Op, planned: dict[int, Sequence]) -> None:
        """Let an `Advance` be complete once these sequences' tokens are settled."""
        op.waiting += [i for i, owed in op.owed.items() if owed]
        op.owed = dict.fromkeys(op.owed, 0)
        op.open = planned


def _promised(sequence: Sequence, chunk: int) -> int:
    """Tokens to plan: one, or of a prompt at most `chunk` (0: all of it)."""
    if not sequence.prefilling:
        return 1
    left = sequence.to_compute
    return sequence.whole(min(chunk, left)) if chunk else left


def _answer(op: _Op) -> Advanced:
    members = op.members.values()
    behind = {s.id: s.to_compute for s in members if s.prefilling}
    waiting = [i for i in op.waiting if i in op.members]
    return Advanced(op.id, behind=behind, waiting=waiting)


class Probes(Planner):
    """Plans liveness probes of routers: one token each, at once, whatever else runs or waits.

    A row and `PROBE_TOKENS` slots are reserved for them beside those that all others share, so a
    pod whose rows and memory are all taken still shows that it can generate. They run one after
    another.

    Args:
        kv: gives the slots.
        rows: of the executor.
    """

    owner = Owner.PROBE

    def __init__(self, kv: KV, rows: Rows) -> None:
        self._kv = kv
        self._rows = rows
        #: Those that are queued, and the one that has a row.
        self.waiting: deque[Sequence] = deque()
        self.running: Sequence | None = None
        #: Slots that the next probe may take.
        self.reserved = PROBE_TOKENS

    def add(self, sequence: Sequence) -> None:
        """Queue a probe: a prompt of less than `PROBE_TOKENS` tokens, and one new token."""
        self.waiting.append(sequence)

    def add_to(self, ledger: Ledger) -> None:
        """What probes take is nobody else's."""
        if self.running is not None:
            ledger.apart(self.running)

    def settle(self, step: Step | None) -> None:
        """Nothing follows a probe's token."""

    def next_rows(self, step: StepBuilder, prompt_tokens: int, slots: int) -> None:
        """Add the whole prompt of the next probe to a step, if none is under way."""
        del prompt_tokens, slots
        if self.running is not None or not self.waiting:
            return
        self.running, self.reserved = self.waiting.popleft(), 0
        sequence = self.running
        sequence.state = State.RUNNING
        self._kv.begin(sequence)
        self._rows.give_probe(sequence)
        step.prompt(sequence, sequence.to_compute)

    def inputs_settled(self, sequence: Sequence) -> None:
        """Publish what the sequence needed: its first output has settled."""
        self._kv.publish_inputs(sequence, awaited=False)

    def released(self, sequence: Sequence) -> None:
        """Forget a sequence whose slots and row are free."""
        if sequence is self.running:
            self.running, self.reserved = None, PROBE_TOKENS
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
