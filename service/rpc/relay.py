"""Passes calls that reach a further front end but belong to the first on to it, unparsed.

A TGI router's batches, health and everything else of which a pod has one live in the first front
end. A connection lands on any of them. So a further one serves streams itself and passes the rest
on, undecoded, over a socket that has no name in any file system; the table of methods says which.
Every process in the network namespace can open the socket, hence the secret: clients have shown
their own tokens to the front end that they reached.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from tokenpod.service.calls.errors import Unauthenticated
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.intake import intake_of
from tokenpod.service.rpc.interceptors import (
    Context,
    Continuation,
    ErrorInterceptor,
    Handler,
    Interceptor,
    Layers,
    metadata_of,
    refusing,
)
from tokenpod.service.rpc.listen import PENDING, add_methods
from tokenpod.service.rpc.methods import Method, MethodTable, Services

#: Metadata of a relayed call: the secret that the front ends share.
SECRET_KEY = "tokenpod-relay"  # noqa: S105 (a name, not a secret)

#: Metadata that the transport sets itself, or that must not reach the other hop, or not twice.
_HOP = frozenset({"user-agent", "te", "content-type", SECRET_KEY})
_HOP_PREFIXES = ("grpc-", ":")
#: What the contract promises of an error, though the names begin with grpc-.
_CONTRACT = frozenset({"grpc-status-details-bin", "grpc-retry-pushback-ms"})


async def serve_relay(
    settings: ServerSettings, services: Services, board: HealthBoard
) -> tuple[grpc.aio.Server, str, str]:
    """Serve the further front ends; the server, its address and the secret that it asks for.

    It records nothing: the front end that a call reached has done so. Every process in the network
    namespace can connect, so it takes no larger messages than the public port, reads no message
    without the secret, and has few connections.
    """
    secret = secrets.token_hex(32)
    layers = [ErrorInterceptor(), RelayGuard(secret), intake_of(settings, services)]
    server = grpc.aio.server(
        interceptors=[Layers(layers)],
        options=[
            ("grpc.max_receive_message_length", settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            *PENDING,
            ("grpc.max_allowed_incoming_connections", most_connections(settings)),
        ],
    )
    add_methods(services, server)
    await board.add_to(server, services.table.served)
    address = f"unix-abstract:tokenpod-{secrets.token_hex(8)}"
    server.add_insecure_port(address)
    await server.start()
    return server, address, secret


def most_connections(settings: ServerSettings) -> int:
    """One for each further front end, and as many again for those that connect anew."""
    return 2 * settings.resolved_front_ends


@contextlib.asynccontextmanager
async def relay_of(address: str, secret: str, table: MethodTable) -> AsyncIterator[Relay]:
    """Passes calls of a further front end on to the first one, at `address`."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield Relay(channel, table, secret=secret)


class RelayGuard(Interceptor):
    """Refuses calls that were not relayed.

    Args:
        secret: what they carry.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        """Refuse calls without the secret."""
        given = metadata_of(details.invocation_metadata, SECRET_KEY)
        if len(given) == 1 and hmac.compare_digest(given[0].encode(), self._secret):
            return handler
        return refusing(handler, Unauthenticated("only this pod's own front ends may call here"))


class Relay(grpc.aio.ServerInterceptor):
    """Answers calls by asking the first front end. The innermost interceptor: tokens are checked.

    Args:
        channel: to the first front end.
        table: says which methods are relayed, and which of them answer with a stream.
        secret: what shows that a front end asks.
    """

    def __init__(self, channel: grpc.aio.Channel, table: MethodTable, *, secret: str) -> None:
        self._channel = channel
        self._secret = secret
        self._handlers = {row.name: self._handler(row) for row in table if row.relayed}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Called by grpc."""
        relayed = self._handlers.get(handler_call_details.method)
        return relayed or await continuation(handler_call_details)

    def _handler(self, row: Method) -> Handler:
        if row.streams:
            return grpc.unary_stream_rpc_method_handler(self._stream(row.name))
        return grpc.unary_unary_rpc_method_handler(self._once(row.name))

    def _once(self, method: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        multicallable: Any = self._channel.unary_unary(method)

        async def ask(request: bytes, context: Context) -> bytes:
            call = multicallable(request, **self._options(context))
            try:
                answer = await call
            except grpc.aio.AioRpcError as error:
                await _pass_on(error, context)
                raise AssertionError("abort raises") from error
            await context.send_initial_metadata(_passed(await call.initial_metadata()))
            context.set_trailing_metadata(_passed(await call.trailing_metadata()))
            return bytes(answer)

        return ask

    def _stream(self, method: str) -> Callable[[bytes, Context], AsyncIterator[bytes]]:
        multicallable: Any = self._channel.unary_stream(method)

        async def ask(request: bytes, context: Context) -> AsyncIterator[bytes]:
            call = multicallable(request, **self._options(context))
            try:
                async for answer in call:
                    yield answer
            except grpc.aio.AioRpcError as error:
                await _pass_on(error, context)
            finally:
                call.cancel()

        return ask

    def _options(self, context: Context) -> dict[str, Any]:
        metadata = _passed(context.invocation_metadata())
        return {
            "timeout": context.time_remaining(),
            "metadata": (*metadata, (SECRET_KEY, self._secret)),
        }


def _passed(metadata: Any) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key in _CONTRACT or not (key in _HOP or key.startswith(_HOP_PREFIXES))
    )


async def _pass_on(error: grpc.aio.AioRpcError, context: Context) -> None:
    await context.abort(error.code(), error.details() or "", _passed(error.trailing_metadata()))
