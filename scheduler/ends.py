"""How sequences end: what becomes free, and how clients hear of it."""

from __future__ import annotations

from collections.abc import Mapping

from tokenpod.core.outputs import Failure, FailureCode, FinishCode
from tokenpod.core.requests import Request
from tokenpod.scheduler.adapter_slots import AdapterSlots
from tokenpod.scheduler.constrained import Constrained
from tokenpod.scheduler.counts import Counts
from tokenpod.scheduler.deadlines import Deadlines
from tokenpod.scheduler.drafting import Drafting
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.planners import Planners
from tokenpod.scheduler.sequence import END_STATES, EndState, Owner, Sequence
from tokenpod.scheduler.work import Settled


class Ends:
    """Ends sequences: nothing more of them is planned, and what they have is free.

    Args:
        sequences: every sequence that exists, by id; those that are gone are taken out.
        planners: have those that wait for a row, or plan them.
        constrained: has those that wait for masks.
        kv: of the scheduler, as all that follows.
    """

    def __init__(
        self,
        sequences: dict[int, Sequence],
        planners: Planners,
        constrained: Constrained,
        *,
        kv: KV,
        adapters: AdapterSlots,
        drafting: Drafting | None,
        deadlines: Deadlines,
        counts: Counts,
    ) -> None:
        self._sequences = sequences
        self._planners = planners
        self._constrained = constrained
        self._kv = kv
        self._adapters = adapters
        self._drafting = drafting
        self._deadlines = deadlines
        self._counts = counts

    def end(self, sequence: Sequence, state: EndState) -> None:
        """End a sequence, with all beams of its search.

        What it has is free at once, or when the step in flight settles (see `free`).
        """
        if sequence.dead:
            return
        # Of a search the first one last: those that wait for its prompt would be queued again.
        beams = [sequence] if sequence.group is None else reversed(sequence.group.sequences)
        for each in beams:
            self._end_one(each, state)

    def end_constrained(self, events: Settled) -> None:
        """End sequences whose constraints allow nothing more, or have failed."""
        for sequence_id, (sequence, failure) in [*self._constrained.over.items()]:
            if sequence.owner is Owner.ROUTER and not self._planners.routed.names(sequence):
                continue
            if failure is None:
                finish(events, sequence_id, FinishCode.CONSTRAINT)
                self.end(sequence, END_STATES[FinishCode.CONSTRAINT])
            else:
                events.failures.append(failure)
                refused = failure.code is FailureCode.INVALID_ARGUMENT
                self.end(sequence, EndState.IGNORED if refused else EndState.ABORTED)

    def free(self, sequence: Sequence) -> None:
        """A sequence has ended and has no step in flight: what it had is free."""
        self._planners.ends(sequence)
        if self._drafting:
            self._drafting.forget(sequence)
        self._kv.release(sequence)
        if self._kv.host is not None:
            self._kv.host.came_back(sequence)
        self._planners.released(sequence)
        self._deadlines.forget(sequence.id)
        del self._sequences[sequence.id]
        self._adapters.leave(sequence)
        sequence.leave()

    def _end_one(self, sequence: Sequence, state: EndState) -> None:
        sequence.end(state)
        if sequence.owner is not Owner.PROBE and not alive(self._sequences, sequence.request):
            self._counts.end(state)
        if not (self._constrained.forget(sequence) or self._planners.queue.remove(sequence)):
            self._planners.batcher.remove(sequence)
        if not sequence.in_flight:
            self.free(sequence)


def alive(sequences: Mapping[int, Sequence], request: Request) -> int:
    """Samples of a request that have not ended."""
    samples = map(sequences.get, request.sequence_ids)
    return sum(sample is not None and not sample.dead for sample in samples)


def reported(sequence: Sequence) -> list[int]:
    """The ids by which clients hear of a sequence."""
    return [sequence.id] if sequence.group is None else sequence.request.reported


def failures(sequence: Sequence, code: FailureCode, problem: str) -> list[Failure]:
    """A failure for each of these ids."""
    return [Failure(each, code, problem) for each in reported(sequence)]


def finish(events: Settled, sequence_id: int, code: FinishCode) -> None:
    """Note an end without a token."""
    # It may be told with a step's tokens: see `Settled.samples`.
    events.samples.append(-1)
    events.logprobs[len(events.sequence_ids)] = 0.0
    events.sequence_ids.append(sequence_id)
    events.token_ids.append(-1)
    events.finishes.append(code)
