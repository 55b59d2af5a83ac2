"""Counts the memory of calls in the front ends: messages, prompts, answers not yet sent.

    check()             before the message is read: is there any memory left?
    reserve(size)       once it has arrived; while it is late, see `LateMessages`
    resize(size)        as texts and answers grow or are sent
    release()           the call is over
    keep(size)          for all calls, as long as the process serves: they have so much less

Only the first two refuse. What a call needs later is counted at once and may pass the limit by what
its own bounds allow (a prompt's tokens, a reader that lags); the next call is refused for it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted


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

    @property
    def part(self) -> int:
        """Bytes that each front end has, if all have the same."""
        return self.most // self._counters.count

    def check(self) -> None:
        """Raise ResourceExhausted if all of the memory is taken."""
        if self.taken >= self.most - self._counters.kept_bytes:
            raise self._refusal("")

    def reserve(self, size: int) -> Lease:
        """Count a call at `size` bytes. Raises ResourceExhausted at once if they are not there.

        Where nothing is counted any size is taken, since waiting would not help.
        """
        taken = self.taken
        if taken and taken + size > self.most - self._counters.kept_bytes:
            raise self._refusal(f", and this one needs {size}")
        return Lease(self._counters, size)

    def keep(self, size: int) -> None:
        """Count bytes that belong to no call. Raises ResourceExhausted if they pass a half."""
        kept = self._counters.kept_bytes
        if kept + size > self.most // 2:
            raise ResourceExhausted(
                f"{size} bytes of memory are to be kept for all calls beside {kept} others; this"
                f" server keeps half of {self.most} at most (--max-front-end-bytes)",
                limit="max_front_end_bytes",
            )
        self._counters.add(kept_bytes=size)

    def give_back(self, size: int) -> None:
        """Bytes that were kept are no longer there."""
        self._counters.add(kept_bytes=-size)

    def _refusal(self, needs: str) -> ResourceExhausted:
        return ResourceExhausted(
            f"calls hold {self.taken} bytes of memory{needs}; this server has"
            f" {self.most - self._counters.kept_bytes} for them (--max-front-end-bytes)",
            limit="max_front_end_bytes",
            retry_after=RETRY_SECONDS,
        )


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


# -- messages that are late --------------------------------------------------------------------

#: A message is late if it is not there so many seconds after its call. What comes earlier is not
#: counted before it is there: no more than the network brings in this time.
LATE_SECONDS = 0.5
#: Parts of a front end's memory that late messages may take: of all connections, and of one.
_PART_OF_ALL = 2
_PART_OF_ONE = 8


class LateMessages:
    """Memory for the messages of one front end that are late.

    gRPC hands over whole messages: how much of one has arrived can't be seen. Most are there at
    once and are counted then, by their size. One that is late counts as the longest that the port
    takes, until it is there. The late messages of all connections may take half of the memory,
    those of one connection an eighth; a call beyond is refused. So calls that send headers and no
    message can refuse no call whose message comes at once, and one connection can take no other's
    part.

    Args:
        memory: of all front ends.
        longest: bytes that a message may have.
    """

    def __init__(self, memory: MemoryBudget, longest: int) -> None:
        self._memory = memory
        self._longest = longest
        messages = memory.part // max(longest, 1)
        self._most = max(messages // _PART_OF_ALL, 1)
        self._most_of_one = max(messages // _PART_OF_ONE, 1)
        #: Messages by connection.
        self._waiting: Counter[str] = Counter()

    @contextlib.contextmanager
    def wait(self, connection: str) -> Iterator[None]:
        """Memory for a late message, until it is there.

        Args:
            connection: the peer's address and port.

        Raises ResourceExhausted if it is not there.
        """
        own, all_ = self._waiting[connection], self._waiting.total()
        if own >= self._most_of_one or all_ >= self._most:
            raise ResourceExhausted(
                f"the message has not arrived after {LATE_SECONDS:g} s; {all_} calls wait for such"
                f" messages, {own} of them of this connection, and this server lets {self._most}"
                f" wait, {self._most_of_one} of a connection (--max-front-end-bytes)",
                limit="late_messages",
                retry_after=RETRY_SECONDS,
            )
        with self._memory.reserve(self._longest):
            self._waiting[connection] += 1
            try:
                yield
            finally:
                self._waiting[connection] -= 1
                if not self._waiting[connection]:
                    del self._waiting[connection]
