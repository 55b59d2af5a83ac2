"""The shard rpcs of a pod that follows: a router's batches are the leader's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from tokenpod.service.rpc.errors import FailedPrecondition
from tokenpod.service.serving.calls import CachedBatch, PrefillCall, ShardStep, WarmupCall


class FollowerShard:
    """Names the leader. Routers call it alone, since `ServiceDiscovery` names no other.

    Args:
        leader_address: host and port.
    """

    def __init__(self, leader_address: str) -> None:
        self.urls = [leader_address]

    async def prefill(self, call: PrefillCall) -> ShardStep:
        """Raises FailedPrecondition."""
        self._refuse()

    async def decode(self, batch_ids: Sequence[int]) -> ShardStep:
        """Raises FailedPrecondition."""
        self._refuse()

    async def filter(self, batch_id: int, request_ids: Sequence[int]) -> CachedBatch | None:
        """Never fails: there is no such batch."""
        return None

    async def clear(self, batch_id: int | None) -> None:
        """Never fails: there is nothing to forget."""

    def warmup(self, call: WarmupCall) -> tuple[int, int, int]:
        """Raises FailedPrecondition."""
        self._refuse()

    def awaited(self, since: float) -> bool:
        """No router has a batch here."""
        return False

    async def end(self, sleep: Callable[[float], Awaitable[None]]) -> int:
        """No batch is cut."""
        return 0

    def _refuse(self) -> NoReturn:
        raise FailedPrecondition(f"this pod follows: ask the leader at {self.urls[0]}")
