"""Checks the scheduler's state while nothing runs, so that a lost slot or row is found in time.

A pod that has lost some goes on with less room, slower and slower, and nobody knows why. It ends
instead, with the facts, and is started again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from tokenpod.core.errors import EngineError
from tokenpod.scheduler.scheduler import Scheduler

#: Without a message for so long the loop is idle: a check would hold up the next request.
_IDLE_SECONDS = 0.01
#: Nanoseconds from one check to the next, at least; and checks take this share of the time at most.
#: (One of a million slots in 500 runs takes some 50 ms, one of 131,072 slots 2 ms.)
_EVERY_NS, _SHARE = 1_000_000_000, 0.01


class IdleCheck:
    """When to check, and the check.

    Args:
        scheduler: is checked.
        clock: nanoseconds.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], int]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._checked_step = 0
        self._due_at = 0

    def patience(self, step: int) -> float | None:
        """Seconds for which an idle loop waits for messages before it calls `run`; None: for ever.

        `step`: the last one that has settled; nothing is checked again before the next one.
        """
        if step == self._checked_step:
            return None
        return max((self._due_at - self._clock()) / 1e9, _IDLE_SECONDS)

    def run(self, step: int) -> None:
        """Check, if it is due. Raises EngineError with what does not add up."""
        began = self._clock()
        if step == self._checked_step or began < self._due_at:
            return
        try:
            self._scheduler.check()
        except AssertionError as error:
            raise EngineError(self._facts(error)) from error
        ended = self._clock()
        self._checked_step = step
        self._due_at = ended + max(_EVERY_NS, int((ended - began) / _SHARE))

    def _facts(self, error: AssertionError) -> str:
        failed = traceback.extract_tb(error.__traceback__)[-1]
        load = self._scheduler.load()
        return (
            f"the scheduler's state is inconsistent while nothing runs: in {failed.name},"
            f" {failed.line}: {error}; of {load.slots} slots"
            f" {load.free_slots} are free and {load.evictable_slots} in the prefix cache without a"
            f" user; {load.running} sequences run and {load.waiting} wait"
        )
