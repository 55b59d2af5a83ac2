"""What a listener to changes of the prefix cache may cost that does not read."""

from __future__ import annotations

import pytest

from tokenpod.core.messages import BlocksRemoved, CacheEvents
from tokenpod.service.calls.errors import ResourceExhausted
from tokenpod.service.pod.client import EngineClient
from tokenpod.service.serving.cache_feed import CacheListener

MANY = BlocksRemoved(list(range(1 << 18)))


async def test_nothing_more_is_kept_for_a_listener_that_lags_behind_too_far() -> None:
    listener = CacheListener(EngineClient())
    listener.hear(CacheEvents(True, []))
    for _ in range(100):
        listener.hear(CacheEvents(False, [MANY]))
    assert len(listener._events) <= 6
    with pytest.raises(ResourceExhausted, match="wait to be read"):
        await listener.next(1.0)
