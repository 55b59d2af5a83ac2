"""The batches that routers have here, each with a lease.

A router can die, or give a batch up without notice: a Prefill that gRPC refuses for its size leaves
the batch that it was to join. So a batch is leased: each Prefill, Decode or FilterBatch that names
it takes it out and puts it back with a new lease, and one whose lease ends is released.

Time does not count while a Prefill runs: routers before v3 keep one batch while they prefill
another. It counts during a Decode: that names every batch which its router still knows, and under
load one always runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tokenpod.service.calls.errors import NotFound
from tokenpod.service.serving.routed import RoutedSequence

#: Seconds without a call after which no router is expected any more. One that lives calls again
#: within milliseconds; these leave room for one that is short of CPU. To wait too long for a router
#: that is gone costs a pod that stops some seconds, to wait too short costs requests.
_GONE_SECONDS = 5.0
#: The least time between two looks at leases.
_TICK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class _Leased:
    sequences: list[RoutedSequence]
    #: By the clock that stands still while a Prefill runs.
    ends_at: float


class Batches:
    """Batch ids and their sequences.

    A batch that a call works on is taken out, so a second call with its id does not find it.

    Args:
        lease: seconds.
        release: takes the id and the sequences of a batch whose lease has ended.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        lease: float,
        release: Callable[[int, list[RoutedSequence]], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leased: dict[int, _Leased] = {}
        self._lease = lease
        self._release = release
        self._now = now
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._calls = 0
        self._called_at = -float("inf")
        self._prefills = 0
        self._prefills_began = 0.0
        #: Seconds in which a Prefill ran.
        self._prefilled = 0.0

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._leased

    def __len__(self) -> int:
        return len(self._leased)

    def close(self) -> None:
        """No lease ends any more."""
        if self._timer is not None:
            self._timer.cancel()

    async def emptied(self) -> None:
        """Wait until no batch is here."""
        await self._empty.wait()

    def take(self, batch_id: int) -> list[RoutedSequence]:
        """Take a batch out. Raises NotFound."""
        if batch_id not in self._leased:
            raise NotFound("batch", str(batch_id), f"Batch ID {batch_id} not found in cache.")
        return self.discard(batch_id)

    def discard(self, batch_id: int) -> list[RoutedSequence]:
        """What a batch held that is to be forgotten; nothing if it is not known."""
        leased = self._leased.pop(batch_id, None)
        if not self._leased:
            self._empty.set()
        return leased.sequences if leased else []

    def discard_all(self) -> list[RoutedSequence]:
        """Forget all batches; returns their sequences."""
        return [sequence for batch_id in list(self._leased) for sequence in self.discard(batch_id)]

    def put(self, batch_id: int, batch: list[RoutedSequence]) -> None:
        """Keep a batch until the next call for it, or until its lease ends."""
        self._leased[batch_id] = _Leased(batch, self._clock() + self._lease)
        self._empty.clear()
        self._watch()

    @contextlib.contextmanager
    def call(self, *, prefill: bool = False) -> Iterator[None]:
        """A router's call runs that steps or changes a batch."""
        self._calls += 1
        if prefill:
            if not self._prefills:
                self._prefills_began = self._now()
            self._prefills += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._called_at = self._now()
            if prefill:
                self._prefills -= 1
                if not self._prefills:
                    self._prefilled += self._now() - self._prefills_began

    def awaited(self, since: float) -> bool:
        """Whether a pod that is to stop waits for a router: a call runs, or one is to be expected.

        A router has one call at a time, and while it is about one batch its others rest. So the
        last call for any of them shows that it lives.

        Args:
            since: when the pod began to wait, by the clock of `now`. A router that has not called
                for long before gets its chance.
        """
        if self._calls:
            return True
        return bool(self._leased) and self._now() - max(since, self._called_at) < _GONE_SECONDS

    def _clock(self) -> float:
        """Seconds in which no Prefill ran."""
        now = self._prefills_began if self._prefills else self._now()
        return now - self._prefilled

    def _watch(self) -> None:
        if self._timer is None and self._leased:
            left = min(leased.ends_at for leased in self._leased.values()) - self._clock()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(left, _TICK_SECONDS), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock()
        for batch_id, leased in list(self._leased.items()):
            if leased.ends_at <= now:
                self._release(batch_id, self.discard(batch_id))
        self._watch()
