"""The batches that routers hold here, and whether a router will come for them again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from tokenpod.service.errors import NotFound
from tokenpod.service.routed import HeldSequence

#: Seconds without a call after which no router is expected any more. One that lives calls again
#: within milliseconds; these leave room for one that is short of CPU. To wait too long for a router
#: that is gone costs a pod that stops some seconds, to wait too short costs requests.
_GONE_SECONDS = 5.0
#: Seconds for which a call may follow the last step of the last batch: a router that calls every
#: pod of a group may reach a follower later than the leader.
_LATE_SECONDS = 0.2


class Batches:
    """Batch ids and their sequences.

    A batch that a call works on is taken out, so a second call with its id does not find it.

    Args:
        now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._held: dict[int, list[HeldSequence]] = {}
        self._now = now
        self._calls = 0
        self._called_at = -float("inf")

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, batch_id: int) -> None:
        """Raises NotFound unless the batch is here."""
        if batch_id not in self._held:
            raise NotFound("batch", str(batch_id), f"Batch ID {batch_id} not found in cache.")

    def take(self, batch_id: int) -> list[HeldSequence]:
        """Take a batch out. Raises NotFound."""
        self.expect(batch_id)
        return self._held.pop(batch_id)

    def discard(self, batch_id: int) -> list[HeldSequence]:
        """What a batch held that is to be forgotten; nothing if it is not known."""
        return self._held.pop(batch_id, [])

    def discard_all(self) -> list[HeldSequence]:
        """What all batches held."""
        sequences = [sequence for batch in self._held.values() for sequence in batch]
        self._held.clear()
        return sequences

    def put(self, batch_id: int, batch: list[HeldSequence]) -> None:
        """Hold a batch until the next call for it."""
        self._held[batch_id] = batch

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A router's call runs that steps or changes a batch."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._called_at = self._now()

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
        now = self._now()
        if self._held and now - since < _GONE_SECONDS:
            return True
        return now - self._called_at < (_GONE_SECONDS if self._held else _LATE_SECONDS)
