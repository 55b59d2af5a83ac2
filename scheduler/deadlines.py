"""When something has to happen because time has passed."""

from __future__ import annotations

import heapq

from tokenpod.core.requests import Request

#: Moments of sequences that are gone, which are not worth a clean-up.
_LEFTOVERS = 64


class Deadlines:
    """Moments at which sequences may have to end, soonest first. Looking costs nothing."""

    def __init__(self) -> None:
        self._moments: list[tuple[int, int]] = []
        self._watched: set[int] = set()

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, request: Request) -> None:
        """Watch a request's moments: its samples' end, and its beginning, which is the first's."""
        moments = request.deadline_at, request.stopping.time_limit_at
        watched = [(moment, i) for moment in moments for i in request.sequence_ids]
        watched.append((request.begin_by, request.sequence_ids[0]))
        for moment, sequence_id in watched:
            if moment is not None:
                heapq.heappush(self._moments, (moment, sequence_id))
                self._watched.add(sequence_id)

    def forget(self, sequence_id: int) -> None:
        """A sequence is gone: clients whose deadlines are an hour away must not pile up here."""
        self._watched.discard(sequence_id)
        if len(self._moments) > 4 * len(self._watched) + _LEFTOVERS:
            self._moments = [each for each in self._moments if each[1] in self._watched]
            heapq.heapify(self._moments)

    def passed(self, now: int) -> list[int]:
        """Ids of sequences with a moment that has passed since the last call."""
        passed = []
        while self._moments and self._moments[0][0] <= now:
            sequence_id = heapq.heappop(self._moments)[1]
            if sequence_id in self._watched:
                passed.append(sequence_id)
        return passed
