"""A router's sequences: stepped only when the router says so.

A step that a router asks for (`Advance`) is one of ours where streams go on by it: they must not
stall for the prompts that join them, which get what is left of the step's prompt budget, shared
with the batcher's. A step of new prompts alone takes as many of ours as they need. Who still waits
for a row has no part in it. Steps whose sequences overlap run one after the other.

    members of an Advance:  no row yet, or no budget left --------------> named in its answer
                            with a row: owed tokens --planned, settled--> nothing owed
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from tokenpod.core.messages import Advance
from tokenpod.scheduler.exact import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.step import Step, StepBuilder
from tokenpod.scheduler.work import Advanced, Limits


@dataclass(slots=True)
class _Op:
    id: int
    #: All that it names and that lives, by id.
    members: dict[int, Sequence]
    #: Prompt tokens that some of them are to be given at most.
    chunks: dict[int, int]
    #: Streams go on by it: it is one step.
    single: bool
    #: It is answered once a sequence has been stepped, not before.
    waits: bool
    #: Members that were not given what they were to be given: no row, or not enough budget.
    waiting: list[int] = field(default_factory=list)
    #: Members with a row that have not had all of theirs settled.
    open: dict[int, Sequence] = field(default_factory=dict)
    #: Tokens that each of them has yet to be given.
    owed: dict[int, int] = field(default_factory=dict)
    begun: bool = False

    @property
    def done(self) -> bool:
        return not self.members or (self.begun and not self.open)


class Routed:
    """Plans the sequences of Prefill and Decode."""

    def __init__(self, limits: Limits, kv: KV) -> None:
        self.ops: list[_Op] = []
        self._limits = limits
        self._kv = kv
        #: Those that wait for a row.
        self._waiting: dict[int, Sequence] = {}
        #: Those with a row; their whole bounds are reserved.
        self._admitted: dict[int, Sequence] = {}

    @property
    def waiting_tokens(self) -> int:
        """Slots that those without a row may come to need."""
        return sum(sequence.bound for sequence in self._waiting.values())

    @property
    def sequences(self) -> Collection[Sequence]:
        """Those with a row."""
        return self._admitted.values()

    def start(self, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        (sequence,) = samples
        self._admitted[sequence.id] = self._waiting.pop(sequence.id)

    def foresee(self, forecast: Forecast, samples: list[Sequence]) -> None:
        """See `queue.Planner`."""
        forecast.frozen(samples[0])

    def add_to(self, forecast: Forecast) -> None:
        """Add the need of those with a row."""
        for sequence in self._admitted.values():
            forecast.frozen(sequence)

    def begin(self, op: Advance, fresh: list[Sequence], resumed: list[Sequence]) -> None:
        """Queue a step of new sequences, which are in the queue, and of earlier ones."""
        self._waiting |= {sequence.id: sequence for sequence in fresh}
        chunks = {s.id: n for s, n in zip(fresh, op.start_chunks, strict=True) if n}
        members = {sequence.id: sequence for sequence in (*fresh, *resumed)}
        self.ops.append(_Op(op.op, members, chunks, bool(resumed), op.waits))

    def plan(self, step: StepBuilder, prefill_tokens: int) -> None:
        """Add to a step, with at most so many prompt tokens."""
        taken: set[int] = set()
        for op in self.ops:
            if taken.isdisjoint(op.members):
                prefill_tokens -= self._plan_op(op, prefill_tokens, step)
            if not op.done:
                taken |= op.members.keys()

    def settle(self, step: Step | None) -> list[Advanced]:
        """Steps that are complete by now."""
        if step is not None and self.ops:
            for sequence in step.sequences:
                self._settle_row(sequence)
        done = [op for op in self.ops if op.done]
        if done:
            self.ops = [op for op in self.ops if not op.done]
        return [_answer(op) for op in done]

    def released(self, sequence: Sequence) -> None:
        """A sequence is gone; nobody owes it anything."""
        self._waiting.pop(sequence.id, None)
        self._admitted.pop(sequence.id, None)
        for op in self.ops:
            op.members.pop(sequence.id, None)
            op.open.pop(sequence.id, None)

    def _settle_row(self, sequence: Sequence) -> None:
        for op in self.ops:
            if sequence.id in op.open and not sequence.in_flight and not op.owed[sequence.id]:
                del op.open[sequence.id]

    def _plan_op(self, op: _Op, budget: int, step: StepBuilder) -> int:
        """Add what an op is owed; how many prompt tokens that is."""
        if op.begun and op.single:
            return 0
        if not op.begun:
            self._begin(op)
        decoding: list[Sequence] = []
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
                n = min(owed, left)
                step.prompt(sequence, n)
                left -= n
            else:
                continue
            planned[sequence.id] = sequence
            op.owed[sequence.id] -= n
        if decoding:
            stalled = step.decode(decoding, np.array([s.place for s in decoding], np.int64))
            assert not stalled, "a router's sequence has its whole bound reserved"
        op.begun = bool(planned) or op.begun or not op.waits
        if op.single and op.begun:
            self._end_after(op, planned)
        return budget - left

    def _begin(self, op: _Op) -> None:
        """Find out who can have a part in a step; again until somebody has."""
        ready = {i: sequence for i, sequence in op.members.items() if i in self._admitted}
        op.waiting = [i for i in op.members if i not in ready]
        op.owed = {i: _promised(sequence, op.chunks.get(i, 0)) for i, sequence in ready.items()}
        op.open = {i: sequence for i, sequence in ready.items() if op.owed[i]}

    def _end_after(self, op: _Op, planned: dict[int, Sequence]) -> None:
        """Let a router's step be over once these sequences' tokens are settled."""
        op.waiting += [i for i, owed in op.owed.items() if owed]
        op.owed = dict.fromkeys(op.owed, 0)
        op.open = planned


def _promised(sequence: Sequence, chunk: int) -> int:
    """Tokens that a step gives: a piece of the prompt (0: all of it), else one."""
    if not sequence.prefilling:
        return 1
    left = sequence.prompt_length - sequence.computed
    return min(chunk, left) if chunk else left


def _answer(op: _Op) -> Advanced:
    members = op.members.values()
    behind = {s.id: s.prompt_length - s.computed for s in members if s.prefilling}
    return Advanced(op.id, behind, [i for i in op.waiting if i in op.members])
