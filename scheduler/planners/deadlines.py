"""Which requests end because time has passed, or because it will have."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from tokenpod.core.requests import Request
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.steps.estimates import PromptTimes

#: Moments of sequences that are gone, which are not worth a clean-up.
_LEFTOVERS = 64


class Late(NamedTuple):
    """A sequence that has to end, and why it fails; None: its time limit has passed."""

    sequence: Sequence
    problem: str | None


class Deadlines:
    """Finds sequences whose deadline or time limit has passed, or can't be met.

    Args:
        sequences: every sequence that exists, by id.
        kv: of the scheduler.
        prompts: how long they take at the least.
    """

    def __init__(self, sequences: Mapping[int, Sequence], kv: KV, prompts: PromptTimes) -> None:
        self._sequences = sequences
        self._kv = kv
        self._prompts = prompts
        self._moments = _Moments()
        #: Ids of sequences that have a moment.
        self.watched = self._moments.watched
        #: First samples of requests that came since the last look.
        self._new: list[Sequence] = []

    def add(self, first: Sequence) -> None:
        """Watch a new request with a moment (`Request.timed`), by its first sample."""
        self._new.append(first)
        self._moments.add(first.request)

    def forget(self, sequence_id: int) -> None:
        """A sequence is gone."""
        self._moments.forget(sequence_id)

    def late(self, now: int, next_ones: Iterable[Sequence]) -> Iterator[Late]:
        """Sequences that have to end now; the caller ends each before it asks for the next.

        Args:
            now: in nanoseconds.
            next_ones: that are computed next, or already. Others in the queue were checked when
                they came, and will be again at its head.
        """
        for sequence_id in self._moments.passed(now):
            sequence = self._sequences.get(sequence_id)
            if sequence is None or sequence.dead:
                continue
            if sequence.group is not None:
                sequence = sequence.group.first
            request = sequence.request
            if _passed(request.deadline_at, now):
                yield Late(sequence, "the deadline passed")
            elif _passed(request.stopping.time_limit_at, now):
                if not sequence.launched:  # else the next token ends it
                    yield Late(sequence, None)
            elif not sequence.began_at:
                yield from _given_up(sequence, now, "calls take longer than that now")
        new, self._new = self._new, []
        for sequence in (*new, *next_ones):
            deadline = sequence.request.deadline_at
            if sequence.dead or sequence.outputs or deadline is None:
                continue
            if now + self._prompts.least(sequence.needed) <= deadline:
                continue
            least = self._prompts.least(sequence.needed - self._kv.known(sequence))
            if now + least > deadline:
                why = f"the prompt takes {least / 1e9:.3f} s at the least"
                yield from _given_up(sequence, now, why)


def _given_up(sequence: Sequence, now: int, why: str) -> Iterator[Late]:
    """All samples of a request that would be late."""
    left = max((sequence.request.deadline_at or now) - now, 0) / 1e9
    problem = f"the deadline can't be met any more: it is {left:.3f} s away, and {why}"
    for sample in [*sequence.samples]:
        if not sample.dead:
            yield Late(sample, problem)


def _passed(moment: int | None, now: int) -> bool:
    return moment is not None and now >= moment


class _Moments:
    """Moments at which sequences may have to end, soonest first. Looking costs nothing."""

    def __init__(self) -> None:
        self._moments: list[tuple[int, int]] = []
        self.watched: set[int] = set()

    def add(self, request: Request) -> None:
        """Watch a request's moments: its samples' end, and its beginning, which is the first's."""
        moments = request.deadline_at, request.stopping.time_limit_at
        watched = [(moment, i) for moment in moments for i in request.sequence_ids]
        watched.append((request.begin_by, request.sequence_ids[0]))
        for moment, sequence_id in watched:
            if moment is not None:
                heapq.heappush(self._moments, (moment, sequence_id))
                self.watched.add(sequence_id)

    def forget(self, sequence_id: int) -> None:
        """A sequence is gone: clients whose deadlines are an hour away must not pile up here."""
        self.watched.discard(sequence_id)
        if len(self._moments) > 4 * len(self.watched) + _LEFTOVERS:
            self._moments = [each for each in self._moments if each[1] in self.watched]
            heapq.heapify(self._moments)

    def passed(self, now: int) -> list[int]:
        """Ids of sequences with a moment that has passed since the last call."""
        passed = []
        while self._moments and self._moments[0][0] <= now:
            sequence_id = heapq.heappop(self._moments)[1]
            if sequence_id in self.watched:
                passed.append(sequence_id)
        return passed
