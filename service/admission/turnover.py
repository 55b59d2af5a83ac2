"""Estimates how long a new call waits and runs, from how long recent calls have run.

A waiting call begins when a running one has ended. With c calls running, each for s seconds on
average, a call behind n others begins after n * s / c. s is counted in steps and converted with the
current time of a step, so that a burst is seen before its first calls have ended.

Under overload the calls that are admitted have just the time that is estimated here. An estimate
that is slightly too short makes all of them late; one that is too long refuses a few that might
have been in time. So a call's run is estimated as the mean plus two mean deviations (as TCP
estimates its timeout; Jacobson, "Congestion Avoidance and Control", 1988). Without a noticeable
queue no call is refused.

A refused call gets a hint of when to come again, as if the refused formed a queue of their own that
moves as fast as calls end. If all of them came again after a second, a pod with ten times the load
that it can serve would do little but refuse the same calls again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenpod.core.outputs import Load
from tokenpod.service.admission.counters import PodCounters

#: Calls that must have ended before anything is estimated, and the least weight of the newest one.
_ENOUGH = 16
_WEIGHT = 1 / 64
#: The part of a call's time that its run may be estimated to take. The rest is for the network, for
#: longer steps, and for other calls.
_USABLE = 0.9
#: A call that waits for less than this part of its time is never refused: it may be a short one
#: among long ones.
_HARMLESS = 0.25


class Paced(Protocol):
    """An engine, as far as its pace goes."""

    load: Load
    #: Seconds that a step usually takes; 0: there was none yet.
    usual_step: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds until a call's first step begins, and from there to its end."""

    wait: float = 0.0
    run: float = 0.0

    def fits(self, seconds: float) -> bool:
        """Whether a call with so much time left is taken in."""
        return self.wait <= max(_USABLE * seconds - self.run, _HARMLESS * seconds)


class Turnover:
    """How soon rows come free.

    Args:
        counters: of the calls of all front ends.
        now: seconds of a clock that never goes back.
    """

    def __init__(self, counters: PodCounters, now: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._now = now
        self._engine: Paced | None = None
        self._rows = 0
        self._ended = 0
        #: Steps of a call from its first to its last: their mean and mean deviation.
        self._steps = self._deviation = 0.0
        #: Calls that this process has refused and expects again, at a moment.
        self._refused = self._refused_at = 0.0

    def watch(self, engine: Paced, rows: int) -> None:
        """The engine is ready; it runs at most `rows` sequences."""
        self._engine, self._rows = engine, rows

    def note(self, seconds: float) -> None:
        """A call of this process has got its last token, so long after its first step began."""
        if self._engine is None or not self._engine.usual_step:
            return
        self._ended += 1
        off = seconds / self._engine.usual_step - self._steps
        weight = max(1 / self._ended, _WEIGHT)
        self._steps += weight * off
        # The first one is no deviation from anything.
        self._deviation += weight * (abs(off) * (self._ended > 1) - self._deviation)

    def begin_within(self, seconds: float, new_tokens: int) -> float:
        """Seconds within which a call has to begin, to end in so many: after them it is dropped.

        Args:
            new_tokens: that it asks for: it takes no more steps than that, and its prompt's.
        """
        if self._engine is None or self._ended < _ENOUGH:
            return seconds
        run = min(self._most_steps, new_tokens + 1) * self._engine.usual_step
        return max(seconds - run / _USABLE, _HARMLESS * seconds)

    def outlook(self) -> Outlook:
        """The estimate for a call that comes now; zeros while too little is known."""
        if self._engine is None or self._ended < _ENOUGH:
            return Outlook()
        running = self._engine.load.running
        # Each count includes too many: calls in prefill, and calls whose answer is being read.
        waiting = min(self._counters.waiting, self._counters.requests - running)
        ahead = waiting - (self._most_running - running)
        return Outlook(max(ahead, 0) * self._each, self._most_steps * self._engine.usual_step)

    def come_again(self, seconds: float | None) -> float:
        """Seconds after which the call that is refused now is worth another try.

        Args:
            seconds: until its deadline; None: it has none. Who has less time than it would have to
                wait is not expected again.
        """
        if self._engine is None or self._ended < _ENOUGH:
            return 0.0
        # Every front end sees its share of the refused, and of the ends.
        each = self._each * self._counters.count
        now = self._now()
        gone = (now - self._refused_at) / each if each else self._refused
        self._refused, self._refused_at = max(self._refused - gone, 0.0), now
        after = self._refused * each
        if seconds is None or after < seconds:
            self._refused += 1
        return after

    @property
    def _each(self) -> float:
        """Seconds from the end of one call to that of the next, while all rows are taken."""
        assert self._engine is not None
        return self._steps * self._engine.usual_step / max(self._most_running, 1)

    @property
    def _most_running(self) -> int:
        """Calls that can run at once."""
        assert self._engine is not None
        # While sequences wait in the engine, as many run as can; else the other rows are free.
        load = self._engine.load
        return load.running if load.waiting else self._rows

    @property
    def _most_steps(self) -> float:
        """Steps that hardly any call exceeds."""
        return self._steps + 2 * self._deviation
