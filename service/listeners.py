"""Who listens on what: here a pod's ports and sockets are opened.

    --port, --tgis-port   every front end, on one port (SO_REUSEPORT): every rpc. What a further
                          front end does not serve itself goes over the relay
    --loopback-port       as --port, for this machine alone: plaintext, and no token but operators'
    --health-port         the first front end: health and reflection, plaintext, for kubelets
    --uds-path            the first front end: every rpc, for a router of TGI on this machine
    --metrics-port        the first front end: the metrics of all front ends, over HTTP
    the relay             the first front end: an abstract unix socket with a secret, for the
                          further ones (rpc/relay.py)
    --shard-port          the leader's rank 0: plans, for the ranks of other pods; within a pod an
                          abstract unix socket with a secret (engine/shards/)
    --master-port         the leader's rank 0: where ranks meet for collectives (torch)

Front ends and engine of a pod are joined by socket pairs, which are inherited and which nobody else
can reach. A pod that follows listens as one that leads does, with one front end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from tokenpod.service.calls.errors import ServiceError
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.certificates import credentials
from tokenpod.service.rpc.health import HealthBoard, serve_health
from tokenpod.service.rpc.intake import intake_of
from tokenpod.service.rpc.interceptors import Closing, ErrorInterceptor
from tokenpod.service.rpc.listen import (
    StartError,
    authorising_operators,
    bind_all,
    check_ports,
    public_server,
    reason,
)
from tokenpod.service.rpc.methods import Services
from tokenpod.service.rpc.router_socket import RouterSocket
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

        No call that is about to come is cancelled: it is refused with `why`. A server that has been
        stopped stays so, so there is another one afterwards. The router's socket is as it was.

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
        """Stop listening, without cancelling calls that are about to come; nothing listens then."""
        self._stopped = True
        await self.public.closing.stop(self.public.server, grace, sleep)
        if self.socket is not None:
            await self.socket.stop(grace)


async def listen(
    settings: ServerSettings,
    services: Services,
    telemetry: Telemetry,
    board: HealthBoard,
    stack: contextlib.AsyncExitStack,
) -> Listener:
    """Open all that a pod's first front end listens on, until `stack` closes. Raises StartError.

    The relay is opened later, with the further front ends: `relay.serve_relay`.
    """
    if settings.resolved_front_ends > 1:
        check_ports(settings)
    make = functools.partial(_public, settings, services, telemetry, board)
    public = await make(settings.address)
    stack.push_async_callback(public.server.stop, None)
    address = f"{settings.address.rpartition(':')[0]}:{public.port}"
    shard_url, socket = address, None
    if (path := settings.socket_path) is not None:
        trusting = [*telemetry.interceptors(services.table), ErrorInterceptor()]
        trusting += authorising_operators(settings, services.table)
        trusting.append(intake_of(settings, services, trusted=True))
        socket = await RouterSocket.listen(settings, path, services, board, trusting)
        stack.push_async_callback(socket.stop, None)
        shard_url = f"unix://{path}"
    if (health_address := settings.health_address) is not None:
        health, _ = await serve_health(health_address, board)
        stack.push_async_callback(health.stop, None)
    try:
        stack.callback(telemetry.listen())
    except OSError as error:
        where = settings.metrics_address or ""
        why = reason(where, error)
        raise StartError(f"cannot listen on {where} (--metrics-port): {why}") from error
    return Listener(public, make, address, shard_url, socket)


async def _public(
    settings: ServerSettings,
    services: Services,
    telemetry: Telemetry,
    board: HealthBoard,
    address: str,
) -> Public:
    """A server that listens on `address`. Raises StartError."""
    recording = telemetry.interceptors(services.table)
    server, closing = public_server(settings, services, recording)
    await board.add_to(server, services.table.served)
    port = bind_all(server, address, settings, credentials(settings))
    await server.start()
    return Public(server, closing, port)
