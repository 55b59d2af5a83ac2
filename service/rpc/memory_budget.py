"""Counts the memory of calls in the front ends: messages, prompts, answers not yet sent.

    reserve(limit)      before the message is read: it may be as large as its method allows
    resize(size)        once it has arrived, and as texts and answers grow or are sent
    release()           the call is over

Only `reserve` refuses. What a call needs later is counted at once and may pass the limit by what
its own bounds allow (a prompt's tokens, a reader that lags); the next call is refused for it.
"""

from __future__ import annotations

from tokenpod.service.pod.counters import PodCounters
from tokenpod.service.rpc.errors import ResourceExhausted

#: Seconds after which a refused client should try again.
_RETRY_SECONDS = 1.0


class MemoryBudget:
    """The bytes that the calls of all front-end processes may take together.

    Args:
        counters: where the bytes are counted.
        most: how many there may be (--max-front-end-bytes).
    """

    def __init__(self, counters: PodCounters, most: int) -> None:
        self.most = most
        self._counters = counters

    @property
    def taken(self) -> int:
        """Bytes that are counted now."""
        return self._counters.call_bytes

    def reserve(self, size: int) -> Lease:
        """Count a call at `size` bytes. Raises ResourceExhausted at once if they are not there.

        Where nothing is counted any size is taken, since waiting would not help.
        """
        taken = self.taken
        if taken and taken + size > self.most:
            raise ResourceExhausted(
                f"calls hold {taken} bytes of memory; with up to {size} of this one they would hold"
                f" more than {self.most} (--max-front-end-bytes)",
                limit="max_front_end_bytes",
                retry_after=_RETRY_SECONDS,
            )
        return Lease(self._counters, size)


class Lease:
    """One call's bytes; release it, or use it as a context manager."""

    def __init__(self, counters: PodCounters, size: int) -> None:
        self._counters = counters
        self._size = 0
        self._released = False
        self.resize(size)

    @property
    def size(self) -> int:
        """Bytes that the call is counted at."""
        return self._size

    def resize(self, size: int) -> None:
        """Count the call at `size` bytes from now on. Never refused; nothing after `release`."""
        if not self._released:
            self._counters.add(call_bytes=size - self._size)
            self._size = size

    def release(self) -> None:
        """The call is over. Also twice."""
        self.resize(0)
        self._released = True

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
