"""What changes in the prefix cache, for those who want to know: gateways that route by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator

from tokenpod.core.messages import CacheEvents, FlushCache, WatchCache
from tokenpod.service.calls.errors import RETRY_SECONDS, ResourceExhausted, Unavailable
from tokenpod.service.pod.client import EngineClient

#: Listeners at once.
MOST_LISTENERS = 64
#: Blocks that may wait for a listener before it is given up.
_MOST_WAITING = 1 << 20


class CacheFeed:
    """Passes the engine's word on to listeners. Each hears first of all that the cache holds.

    The engine tells the first front end alone, and only while somebody listens.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._listeners: set[CacheListener] = set()
        client.on_cache = self._tell

    @contextlib.contextmanager
    def listen(self) -> Iterator[CacheListener]:
        """Listen for a while. Raises ResourceExhausted if too many do."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise ResourceExhausted(
                f"{len(self._listeners)} streams of cache events are open; this server takes at"
                f" most {MOST_LISTENERS}",
                limit="cache event streams",
                retry_after=RETRY_SECONDS,
            )
        listener = CacheListener(self._client)
        self._listeners.add(listener)
        # The others hear of it all again, which changes nothing.
        self._client.send(WatchCache(True))
        try:
            yield listener
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._client.send(WatchCache(False))

    def flush(self) -> None:
        """Forget every cached prefix that nobody uses."""
        self._client.send(FlushCache())

    def _tell(self, events: CacheEvents) -> None:
        for listener in self._listeners:
            listener.hear(events)


class CacheListener:
    """What one listener has not heard yet."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._events: deque[CacheEvents] = deque()
        self._waiting = 0
        self._begun = False
        self._fresh = asyncio.Event()

    def hear(self, events: CacheEvents) -> None:
        """Something has changed. What comes before all that the cache holds is of no use.

        Of a listener that lags behind too far nothing more is kept: `next` ends it.
        """
        self._begun = self._begun or events.cleared
        if self._begun and self._waiting <= _MOST_WAITING:
            self._events.append(events)
            self._waiting += _blocks(events)
            self._fresh.set()

    async def next(self, seconds: float) -> CacheEvents | None:
        """The next changes; None: nothing has changed for so long.

        Raises:
            Unavailable: the engine is lost.
            ResourceExhausted: the listener lags behind too far.
        """
        if not self._events:
            self._fresh.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), seconds)
        if self._client.lost.done():
            raise Unavailable("the model's engine was lost; retry", retry_after=RETRY_SECONDS)
        if self._waiting > _MOST_WAITING:
            problem = (
                f"{self._waiting} blocks of the cache wait to be read; at most {_MOST_WAITING}"
            )
            raise ResourceExhausted(f"{problem} may", limit="unread cache events")
        if not self._events:
            return None
        events = self._events.popleft()
        self._waiting -= _blocks(events)
        return events


def _blocks(events: CacheEvents) -> int:
    return 1 + sum(len(change.hashes) for change in events.changes)
