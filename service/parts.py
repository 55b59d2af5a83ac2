"""What a pod has for as long as it lives, however often its engines start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from tokenpod.core.messages import Load
from tokenpod.service.admission import Admission
from tokenpod.service.client import NO_LOAD, EngineClient
from tokenpod.service.closing import Closing
from tokenpod.service.forming import Forming
from tokenpod.service.generate import GenerateService
from tokenpod.service.health import HealthBoard
from tokenpod.service.house import House
from tokenpod.service.router_socket import RouterSocket
from tokenpod.service.servicers import Rpcs
from tokenpod.service.stopping import Stopping


@dataclass(frozen=True, slots=True)
class Listener:
    """The bound server, and what it can be reached by.

    Args:
        server: listens on the port.
        closing: one of its interceptors.
        address, shard_url: for clients and for routers.
        socket: for routers; None: they use the port.
    """

    server: grpc.aio.Server
    closing: Closing
    address: str
    shard_url: str
    socket: RouterSocket | None

    async def stop(self, grace: float, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Stop listening; see `Closing.stop`."""
        await self.closing.stop(self.server, grace, sleep)
        if self.socket is not None:
            await self.socket.stop(grace)


@dataclass(slots=True)
class CurrentLoad:
    """The load of the engine that serves, whichever it is."""

    client: EngineClient | None = None

    def __call__(self) -> Load:
        """Of none: nothing."""
        return self.client.load if self.client else NO_LOAD


@dataclass(frozen=True, slots=True)
class Parts:
    """All of it."""

    house: House
    admission: Admission
    board: HealthBoard
    generate: GenerateService
    rpcs: Rpcs
    listener: Listener
    stopping: Stopping
    forming: Forming
    load: CurrentLoad
