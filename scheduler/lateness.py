"""Who ends because time has passed, or because it will have."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tokenpod.core.outputs import FailureCode, FinishCode
from tokenpod.core.requests import Request
from tokenpod.scheduler.deadlines import Deadlines
from tokenpod.scheduler.ends import failures, finish, reported
from tokenpod.scheduler.kv import KV
from tokenpod.scheduler.pace import Pace
from tokenpod.scheduler.planners import Planners
from tokenpod.scheduler.sequence import EndState, Sequence
from tokenpod.scheduler.work import Settled


class Lateness:
    """Drops requests whose deadline or time limit has passed, or can't be met.

    Args:
        sequences: every sequence that exists, by id.
        kv: of the scheduler, as the next three.
        planners: who waits, and who runs.
        deadlines: their moments.
        pace: how long prompts take at the least.
        end: ends a sequence in a state.
    """

    def __init__(
        self,
        sequences: Mapping[int, Sequence],
        kv: KV,
        planners: Planners,
        *,
        deadlines: Deadlines,
        pace: Pace,
        end: Callable[[Sequence, EndState], None],
    ) -> None:
        self._sequences = sequences
        self._kv = kv
        self._planners = planners
        self._pace = pace
        self._end = end
        self._deadlines = deadlines
        #: First samples of requests that came since the last look.
        self._new: list[Sequence] = []

    @property
    def watches(self) -> bool:
        """Whether any request has a moment, or has not been looked at."""
        return bool(self._new or self._deadlines)

    def add(self, first: Sequence) -> None:
        """Watch a new request, by its first sample."""
        self._new.append(first)
        self._deadlines.add(first.request)

    def drop(self, now: int, events: Settled) -> None:
        """End whoever is late, and whoever will be."""
        self._drop_late(now, events)
        self._drop_hopeless(now, events)

    def _drop_late(self, now: int, events: Settled) -> None:
        """End sequences whose deadline or time limit has passed."""
        for sequence_id in self._deadlines.passed(now):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.dead:
                continue
            if sequence.group is not None:
                sequence = sequence.group.first
            request = sequence.request
            if _passed(request.deadline_at, now):
                problem = "the deadline passed"
                code = FailureCode.DEADLINE_EXCEEDED
                events.failures += failures(sequence, code, problem)
                self._end(sequence, EndState.ABORTED)
            elif _passed(request.stopping.time_limit_at, now):
                if sequence.launched:
                    # The next token ends it.
                    continue
                for each in reported(sequence):
                    finish(events, each, FinishCode.TIME_LIMIT)
                self._end(sequence, EndState.LENGTH)
            elif not sequence.began_at:
                self._give_up(request, now, "calls take longer than that now", events)

    def _drop_hopeless(self, now: int, events: Settled) -> None:
        """End sequences that can't have their first token in time, before it costs anything."""
        new, self._new = self._new, []
        waiting = self._planners.queue.head[:1]
        # Others in the queue were checked when they came, and will be again at its head.
        for sequence in (*new, *waiting, *self._planners.batcher.prefilling):
            deadline = sequence.request.deadline_at
            if sequence.dead or sequence.outputs or deadline is None:
                continue
            if now + self._pace.least(sequence.needed) <= deadline:
                continue
            least = self._pace.least(sequence.needed - self._kv.known(sequence))
            if now + least > deadline:
                why = f"the prompt takes {least / 1e9:.3f} s at the least"
                self._give_up(sequence.request, now, why, events)

    def _give_up(self, request: Request, now: int, why: str, events: Settled) -> None:
        """End all samples of a request that would be late."""
        left = max((request.deadline_at or now) - now, 0) / 1e9
        problem = f"the deadline can't be met any more: it is {left:.3f} s away, and {why}"
        for sequence_id in request.sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and not sequence.dead:
                code = FailureCode.DEADLINE_EXCEEDED
                events.failures += failures(sequence, code, problem)
                self._end(sequence, EndState.ABORTED)


def _passed(moment: int | None, now: int) -> bool:
    return moment is not None and now >= moment
