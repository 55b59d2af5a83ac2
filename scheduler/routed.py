"""A router's sequences: advanced only when the router says so.

A step that a router asks for (`Advance`) may take several of ours: its prompts share the prompt
budget with the batcher's. It is complete when each of its sequences has got what it was promised: a
token, or the piece of its prompt that was asked for. Steps whose sequences overlap run one after
the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tokenpod.engine.types import Advance
from tokenpod.scheduler.batcher import decode_work, prompt_work
from tokenpod.scheduler.forecast import Forecast
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.rows import Rows
from tokenpod.scheduler.sequence import Sequence
from tokenpod.scheduler.work import Limits, Step, Work


@dataclass(slots=True)
class _Op:
    id: int
    #: Position up to which each prompt is processed, by sequence id; 0: to its end.
    until: dict[int, int]
    #: Sequences that have not had all of theirs settled.
    open: dict[int, Sequence]
    #: Tokens that each sequence has yet to be given, known from its first turn on.
    owed: dict[int, int] = field(default_factory=dict)


class HeldSequences:
    """Plans the sequences of Prefill and Decode."""

    def __init__(self, limits: Limits, kv: KV, rows: Rows) -> None:
        self.ops: list[_Op] = []
        self._limits = limits
        self._kv = kv
        self._rows = rows
        self._sequences: dict[int, Sequence] = {}

    @property
    def sequences(self) -> Collection[Sequence]:
        """Everything that routers hold."""
        return self._sequences.values()

    def has(self, sequence: Sequence) -> bool:
        """Whether a router holds this sequence."""
        return sequence.id in self._sequences

    def reserve(self, fresh: list[Sequence], forecast: Forecast, now: int) -> str | None:
        """Take new sequences in with all of their bounds; else say why that is impossible."""
        if len(fresh) > self._rows.free:
            return (
                f"{len(fresh)} sequences are to start; {self._rows.free} of"
                f" {self._limits.max_rows} rows are free (--max-batch-size)"
            )
        for sequence in fresh:
            self._kv.begin(sequence)
        forecast.frozen([*self.sequences, *fresh])
        need = forecast.peak()
        if need > self._limits.slots:
            for sequence in fresh:
                self._kv.withdraw(sequence)
            return (
                f"{need} tokens of KV cache would be needed, {sum(s.bound for s in fresh)} of them"
                f" for this batch; there are {self._limits.slots} (--max-batch-total-tokens)"
            )
        for sequence in fresh:
            self._rows.give(sequence)
            self._sequences[sequence.id] = sequence
        return None

    def begin(self, op: Advance, fresh: list[Sequence], resumed: list[Sequence]) -> None:
        """Queue a step."""
        everyone = {sequence.id: sequence for sequence in (*fresh, *resumed)}
        until = [*op.start_until, *op.resume_until]
        self.ops.append(_Op(op.op, dict(zip(everyone, until, strict=True)), everyone))

    def plan(self, now: int, *, share: bool) -> list[Work]:
        """This step's works; with `share`, half of the prompt budget is the batcher's."""
        works: list[Work] = []
        budget = self._limits.prefill_tokens
        if share:
            budget -= budget // 2
        taken: set[int] = set()
        for op in self.ops:
            if taken.isdisjoint(op.open):
                budget = self._plan_op(op, budget, now, works)
            taken |= op.open.keys()
        return works

    def settle(self, step: Step | None) -> list[int]:
        """Steps that are complete by now."""
        if step is not None:
            for work in step.works:
                for op in self.ops:
                    sequence = op.open.get(work.sequence.id)
                    if sequence is None or sequence.in_flight:
                        continue
                    if op.owed.get(sequence.id) == 0:
                        del op.open[sequence.id]
        done = [op.id for op in self.ops if not op.open]
        if done:
            self.ops = [op for op in self.ops if op.open]
        return done

    def remove(self, sequence: Sequence) -> None:
        """A sequence is gone; nobody owes it anything."""
        if self._sequences.pop(sequence.id, None) is not None:
            for op in self.ops:
                op.open.pop(sequence.id, None)

    def _plan_op(self, op: _Op, budget: int, now: int, works: list[Work]) -> int:
        for sequence in list(op.open.values()):
            if sequence.dead:
                continue
            owed = op.owed.get(sequence.id)
            if owed is None:
                owed = op.owed[sequence.id] = _share(sequence, op.until[sequence.id])
                if not owed:
                    # The cache had this piece of the prompt already.
                    del op.open[sequence.id]
            if not owed:
                continue
            if not sequence.prefilling:
                works.append(decode_work(self._kv, sequence))
                op.owed[sequence.id] = 0
            elif budget > 0:
                n = min(owed, budget)
                works.append(prompt_work(self._kv, sequence, n, now))
                op.owed[sequence.id] -= n
                budget -= n
        return budget


def _share(sequence: Sequence, until: int) -> int:
    """Tokens that a router's step gives: the prompt up to `until` (0: its end), else one."""
    if not sequence.prefilling:
        return 1
    end = min(until, sequence.prompt_length) if until else sequence.prompt_length
    return max(end - sequence.computed, 0)
