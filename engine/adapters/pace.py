"""How threads beside the step loop work without its notice.

A thread that calls into torch lets go of the interpreter's lock for microseconds at a time: one
that waits for the lock is woken and finds it taken again, for as long as such calls follow each
other. Locks of the device's driver go from hand to hand likewise. So what works beside the loop
does so in slices, and sleeps between them: a moment while the loop waits, longer while it works.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Of work, before others get their turn.
SLICE_SECONDS = 200e-6
#: What a thread needs to wake up and take the lock.
_MOMENT_SECONDS = 50e-6
#: While the loop works, the others sleep so many times as long as they have worked, and at most so
#: long: a loop that never waits, as on a CPU, does not keep them for ever.
_TIMES, _MOST_SECONDS = 3, 2e-3


class Pace:
    """Whether the step loop's thread works; as a context of the loop: it waits.

    Args:
        clock: seconds.
        sleep: waits so many of them.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._waits = True
        #: When the thread beside it began its slice.
        self._since = 0.0

    def __enter__(self) -> None:
        self._waits = True

    def __exit__(self, *_: object) -> None:
        self._waits = False

    def rest(self) -> None:
        """Called by the one thread beside the loop after each little piece of work."""
        now = self._clock()
        worked = now - self._since
        if worked < SLICE_SECONDS:
            return
        until = now + min(worked * _TIMES, _MOST_SECONDS)
        while True:
            self._sleep(_MOMENT_SECONDS)
            now = self._clock()
            if self._waits or now >= until:
                break
        self._since = now
