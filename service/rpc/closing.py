"""Closes a server's connections without cancelling calls that are about to come.

gRPC announces a stop to clients (GOAWAY) and cancels the calls that they send before they have read
it, with CANCELLED, which clients do not retry. But a client that waits for an answer sends no call.
So the last calls get no answer until GOAWAY has been sent to all clients; then they are refused,
with a hint to retry.

    serving -- clients call again, and wait --> stop: GOAWAY --> the waiting calls are refused
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection

import grpc

from tokenpod.service.admission.admission import DRAINING
from tokenpod.service.calls.errors import RETRY_SECONDS, ServiceError, Unavailable
from tokenpod.service.rpc.interceptors import Handler, Interceptor, refusing

#: Seconds in which a client that retries calls again: the hint of a refusal is a little shorter.
AGAIN_SECONDS = 1.25 * RETRY_SECONDS
_DRAINING = Unavailable(DRAINING, retry_after=RETRY_SECONDS)


class Closing(Interceptor):
    """Delays the answers to the last calls of a server. It comes after authorisation.

    Args:
        most: calls that wait at the same time; more are refused at once.
        exempt: full names of the methods whose calls pass: probes must not wait.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        most: int,
        exempt: Collection[str] = (),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._exempt = exempt
        self._now = now
        self._called_at = -float("inf")
        self._kept = 0
        #: Set once GOAWAY has been sent to all clients; None while the server serves.
        self._told: asyncio.Event | None = None
        self._why: ServiceError = _DRAINING

    async def stop(
        self,
        server: grpc.aio.Server,
        grace: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        why: ServiceError = _DRAINING,
    ) -> None:
        """Stop `server`, for good; at once if no call has come recently.

        A server that has been stopped stays so.

        Args:
            server: what this interceptor is part of.
            grace: seconds that running calls get after that.
            sleep: may return early, if it has become urgent.
            why: the error of the calls that waited.
        """
        if self._told is not None:
            await server.stop(None)
            return
        self._told, self._why = asyncio.Event(), why
        if self._now() - self._called_at < AGAIN_SECONDS:
            await sleep(AGAIN_SECONDS)
        stopping = asyncio.create_task(server.stop(grace))
        # The stop begins. On each connection GOAWAY goes ahead of the answers.
        await asyncio.sleep(0)
        self._told.set()
        await stopping

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """While the server closes, let the call wait and refuse it."""
        if details.method in self._exempt:
            return handler
        self._called_at = self._now()
        if self._told is None:
            return handler
        return refusing(handler, self._why, self._keep)

    async def _keep(self) -> None:
        """Wait until GOAWAY has been sent to all clients."""
        assert self._told is not None
        if self._kept >= self._most:
            return
        self._kept += 1
        try:
            await self._told.wait()
        finally:
            self._kept -= 1
