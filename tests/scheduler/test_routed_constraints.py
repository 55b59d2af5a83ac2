"""A router's sequences under constraints: their ends, and the answers to the router's steps.

The service names in a router's next step every sequence whose end it has not been sent. So an end
must leave the scheduler no later than the answer to the step in which the sequence ended: else the
next step names a sequence that is gone, and fails for all of the batch.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from support.engines.scheduler_driver import request
from support.examples import ALL
from tokenpod.core.constraints import Regex
from tokenpod.core.messages import Advance
from tokenpod.core.outputs import Failure, FailureCode, FinishCode
from tokenpod.core.plan import UNSAMPLED
from tokenpod.core.requests import Request
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.scheduler import Limits, Scheduler, Settled, Step
from tokenpod.scheduler.sequences.sequence import Sequence

LIMITS = Limits(slots=400, max_rows=6, max_positions=100, prefill_tokens=16)
CONSTRAINT = Regex("a+")


@pytest.mark.parametrize("problem", ["", "not a regex"])
def test_the_only_constrained_sequence_ends_before_its_step_is_answered(problem: str) -> None:
    scheduler = Scheduler(LIMITS)
    both = [request(1, [1] * 3), request(2, [2] * 3, constraint=CONSTRAINT)]
    assert scheduler.advance(Advance(1, both, [0, 0], [], waits=False)) is None
    refused = Failure(2, FailureCode.INVALID_ARGUMENT, problem) if problem else None
    scheduler.end_constrained(2, refused)
    step = scheduler.plan(0)
    assert step is not None
    assert [sequence.id for sequence in step.sequences] == [1]
    settled = scheduler.settle(step, [7], 0)
    assert [advanced.op for advanced in settled.advanced] == [1]
    if refused:
        assert settled.failures == [refused]
    else:
        ends = dict(zip(settled.sequence_ids, settled.finishes, strict=True))
        assert ends == {1: FinishCode.RUNNING, 2: FinishCode.CONSTRAINT}


class Batch:
    """Steps one batch as the service does, over a scheduler whose masks come or do not, by chance.

    Args:
        overlap: a step is planned before the one before it has settled.
    """

    def __init__(self, seed: int, *, overlap: bool) -> None:
        self.chance = random.Random(seed)
        self.scheduler = Scheduler(LIMITS)
        self.overlap = overlap
        #: Sequences that have not ended, as far as the service has heard.
        self.live: set[int] = set()
        self.ops = self.answered = 0
        #: How sequences of the router have ended.
        self.ends: list[FinishCode | FailureCode] = []
        #: Those of them that the batch had when its last step was answered: what the engine sends
        #: after that answer may arrive after the next step has been sent.
        self._known: set[int] = set()
        self._named: set[int] = set()
        self._taken: dict[int, int] = {}
        self._flying: Step | None = None
        self._next = 0

    def ask(self, fresh: int) -> None:
        """The next step of the batch, with so many new requests."""
        assert self.ops == self.answered
        start = [self._request() for _ in range(fresh)]
        resumed = sorted(self._known)
        self.ops += 1
        op = Advance(self.ops, start, [0] * fresh, resumed, waits=not start)
        failure = self.scheduler.advance(op)
        assert failure is None, failure
        self.live |= {asked.sequence_ids[0] for asked in start}
        self._named = set(self.live)

    def submit(self) -> None:
        """A request of another client, also under a constraint or not."""
        self.scheduler.submit(self._request())

    def turn(self) -> None:
        """One turn of the engine's loop."""
        scheduler, chance = self.scheduler, self.chance
        waiting = [sequence.id for sequence in scheduler.waiting_for_masks]
        for sequence_id in waiting:
            match chance.randrange(4):
                case 0:
                    refused = Failure(sequence_id, FailureCode.INVALID_ARGUMENT, "no regex")
                    scheduler.end_constrained(sequence_id, chance.choice([None, refused]))
                case 1 | 2:
                    scheduler.masked([sequence_id])
        step = scheduler.plan(0)
        previous, self._flying = self._flying, None
        if previous is not None:
            self._settle(previous)
        if step is not None and not self.overlap:
            self._settle(step)
        else:
            self._flying = step
        self._hear(scheduler.drain_events())
        scheduler.check()

    def _request(self) -> Request:
        self._next += 1
        constraint = self.chance.choice([None, CONSTRAINT])
        asked = request(
            self._next,
            [1] * self.chance.randint(1, 20),
            max_new_tokens=self.chance.randint(1, 6),
            constraint=constraint,
        )
        bad = ((3,),) if self.chance.random() < 0.3 else ()
        return msgspec.structs.replace(asked, sampling=SamplingParams(bad_words=bad))

    def _settle(self, step: Step) -> None:
        outputs = step.plan.r_output[np.flatnonzero(step.plan.r_samples)].tolist()
        tokens = [
            self._token(sequence, output)
            for sequence, output in zip(step.sampled, outputs, strict=True)
        ]
        self._hear(self.scheduler.settle(step, tokens, 0))

    def _token(self, sequence: Sequence, output: int) -> int:
        taken = self._taken.get(sequence.id, 0)
        if sequence.constrained:
            # One whose mask was late is planned a token too far; only rows that decode are late.
            late = output and self.chance.random() < 0.3
            if late or output != taken:
                return UNSAMPLED
        self._taken[sequence.id] = taken + 1
        return -1 if self.chance.random() < 0.05 else 7

    def _hear(self, settled: Settled) -> None:
        for sequence_id, finish in zip(settled.sequence_ids, settled.finishes, strict=True):
            if finish:
                self._end(sequence_id, finish)
        for failure in settled.failures:
            self._end(failure.sequence_id, failure.code)
        for advanced in settled.advanced:
            assert advanced.failure is None
            self.answered += 1
            assert advanced.op == self.ops == self.answered
            self._known = set(self.live)

    def _end(self, sequence_id: int, how: FinishCode | FailureCode) -> None:
        if sequence_id in self._named:
            assert sequence_id in self.live, "it has ended twice"
            self.live.remove(sequence_id)
            self.ends.append(how)


@pytest.mark.compute
@pytest.mark.parametrize("overlap", [False, True])
def test_a_router_never_names_a_sequence_that_is_gone(*, overlap: bool) -> None:
    """Whoever ends first or last, beside whomever: no step of the batch is refused."""
    ends = []
    for seed in range(40 if ALL else 20):
        batch = Batch(seed, overlap=overlap)
        for _ in range(60):
            if batch.ops == batch.answered and batch.chance.random() < 0.8:
                fresh = batch.chance.choice([0, 0, 1, 3])
                batch.ask(fresh if batch.live else max(fresh, 1))
            if batch.chance.random() < 0.05:
                batch.submit()
            batch.turn()
        for _ in range(400):
            if batch.ops == batch.answered:
                if not batch.live:
                    break
                batch.ask(0)
            batch.turn()
        assert not batch.live, "sequences that never ended"
        ends += batch.ends
    assert {*ends} == {
        *(FinishCode.LENGTH, FinishCode.CONSTRAINT),
        *(FailureCode.INVALID_ARGUMENT, FailureCode.DATA_LOSS),
    }
