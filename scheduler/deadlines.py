"""When something has to happen because time has passed."""

from __future__ import annotations

import heapq

from tokenpod.engine.types import Request


class Deadlines:
    """Moments at which sequences may have to end, soonest first. Looking costs nothing."""

    def __init__(self) -> None:
        self._moments: list[tuple[int, int]] = []

    def add(self, request: Request) -> None:
        """Watch a request's deadline and time limit."""
        for moment in (request.deadline_at, request.stopping.time_limit_at):
            if moment is not None:
                for sequence_id in request.sequence_ids:
                    heapq.heappush(self._moments, (moment, sequence_id))

    def passed(self, now: int) -> list[int]:
        """Ids of sequences with a moment that has passed since the last call."""
        passed = []
        while self._moments and self._moments[0][0] <= now:
            passed.append(heapq.heappop(self._moments)[1])
        return passed
