"""What a pod has for as long as it lives, however often its engines start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from tokenpod.core.outputs import Load
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.calls.errors import ServiceError
from tokenpod.service.pod.client import NO_LOAD, EngineClient
from tokenpod.service.pod.startup import GroupStartup
from tokenpod.service.pod.stopping import Stopping
from tokenpod.service.rpc.closing import Closing
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.listen import StartError
from tokenpod.service.rpc.router_socket import RouterSocket
from tokenpod.service.serving.backend import Backend
from tokenpod.service.telemetry.recorder import Telemetry

#: Seconds that calls get which run while connections are closed: those for health.
_GRACE_SECONDS = 0.5
#: A port may be closed a moment later than its server.
_BIND_ATTEMPTS, _BIND_SECONDS = 20, 0.1


@dataclass(frozen=True, slots=True)
class Public:
    """A server that listens on the public port, and one of its interceptors."""

    server: grpc.aio.Server
    closing: Closing
    port: int


@dataclass(slots=True)
class Listener:
    """The servers of a pod, and their addresses.

    Args:
        public: what listens on the port.
        make: another one, on this address; raises StartError.
        address, shard_url: for clients and for routers.
        socket: for routers; None: they use the port.
    """

    public: Public
    make: Callable[[str], Awaitable[Public]]
    address: str
    shard_url: str
    socket: RouterSocket | None
    _stopped: bool = False

    async def renew(self, why: ServiceError, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Close all connections to the port, and listen on it again.

        No call is cancelled; see `Closing.stop`. A server that has been stopped stays so, so there
        is another one afterwards. The router's socket is as it was.

        Args:
            why: the error of calls that come meanwhile.
            sleep: may return early, if it has become urgent.
        """
        await self.public.closing.stop(self.public.server, _GRACE_SECONDS, sleep, why)
        for attempt in range(_BIND_ATTEMPTS):
            if self._stopped:
                return
            try:
                self.public = await self.make(self.address)
                break
            except StartError:
                if attempt == _BIND_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(_BIND_SECONDS)
        if self._stopped:
            await self.public.server.stop(None)

    async def stop(self, grace: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Stop listening; see `Closing.stop`."""
        self._stopped = True
        await self.public.closing.stop(self.public.server, grace, sleep)
        if self.socket is not None:
            await self.socket.stop(grace)


class Renewal:
    """Closes the connections of a replica that has lost a rank: clients may reach another one.

    Connections are closed once the replica has been NOT_SERVING for some time. Before that, clients
    would connect to it again.
    """

    def __init__(self) -> None:
        self._waiting: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    def begin(self, seconds: float, renew: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Call `renew` in so many seconds, unless `end` comes first."""

        async def wait() -> None:
            await asyncio.sleep(seconds)
            self._renewing = asyncio.create_task(renew())

        self._waiting = asyncio.create_task(wait())

    async def end(self) -> None:
        """The replica is about to serve: wait for a renewal that has begun, or raise its error."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._renewing is not None:
            await self._renewing


@dataclass(slots=True)
class PodState:
    """State that lasts as long as the pod's process, however often its engines start."""

    counters: PodCounters
    admission: Admission
    board: HealthBoard
    backend: Backend
    listener: Listener
    stopping: Stopping
    startup: GroupStartup
    renewal: Renewal
    telemetry: Telemetry
    #: The engine that serves now.
    client: EngineClient | None = None
    #: What a stop has cut off, by its name in the log; None: nobody has asked the pod to stop.
    stopped: dict[str, int] | None = None

    def load(self) -> Load:
        """Its load; without an engine, none."""
        return self.admission.whole(self.client.load if self.client else NO_LOAD)
