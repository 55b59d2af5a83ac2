"""When steps were planned and settled: how long each of them has taken."""

from __future__ import annotations


class StepClock:
    """Knows which steps are under way. Times are nanoseconds."""

    def __init__(self) -> None:
        self._settled_at = 0
        #: Steps that have not settled; and nothing could run since the last one.
        self._under_way, self._rested = 0, True

    def idle(self) -> None:
        """Nothing can run."""
        self._rested = self._rested or not self._under_way

    def planned(self, now: int) -> int | None:
        """A step is planned; see `Step.gap`."""
        busy = not (self._rested or self._under_way)
        self._under_way += 1
        self._rested = False
        return now - self._settled_at if busy else None

    def settled(self, planned_at: int, now: int) -> int:
        """The step that was planned at a moment has settled; how long it has taken."""
        # A step that was planned during another began no sooner than that one ended.
        took = now - max(planned_at, self._settled_at)
        self._settled_at = now
        self._under_way -= 1
        return took
