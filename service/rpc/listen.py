"""The server on the public port: interceptors in their order, options, and how binding fails."""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Sequence
from typing import Any

import grpc

from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.intake import intake_of
from tokenpod.service.rpc.interceptors import (
    ARITIES,
    AuthInterceptor,
    Closing,
    ErrorInterceptor,
    Interceptor,
    Layers,
)
from tokenpod.service.rpc.methods import Access, MethodTable, Services
from tokenpod.service.rpc.reflection import enable_reflection

#: gRPC's own "never", for times in milliseconds.
_NEVER_MS = 2**31 - 1

#: How long gRPC waits for a connection's first bytes, TLS included, and for the answer to a ping. A
#: connection that is silent for longer is closed, because it holds a file descriptor.
CONNECTION_TIMES = (
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
)
#: Calls that have arrived and that Python has not taken yet. Beyond this number gRPC resets all:
#: CANCELLED without details, which clients do not try again. A call that its client gives up (its
#: deadline passes, or it is reset) frees its stream at once, but waits here until Python takes it,
#: and holds some 14 kB. So a connection may have as many such calls as it has streams: beyond them
#: gRPC refuses its calls (REFUSED_STREAM: not begun, safe to try again), and it takes none of the
#: others' room, however fast it opens and resets streams.
_MOST_PENDING = 65_536
#: A day: longer than any call waits there. Beyond it gRPC would reset a call, too.
_PENDING_SECONDS = 86_400
#: That queue's options, of every server whose callers must not meet CANCELLED.
PENDING = (
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", _PENDING_SECONDS),
)
_LEAST_STREAMS = 256


def most_streams(settings: ServerSettings) -> int:
    """Calls of one connection at once: one connection may fill a batch, and the queue behind it."""
    return max(_LEAST_STREAMS, 2 * settings.resolved_batch_size)


class StartError(Exception):
    """The server cannot start; the text is one line for the operator."""


def channel_options(settings: ServerSettings, *, shared_port: bool) -> list[tuple[str, int]]:
    """gRPC's options of the public server; `shared_port`: other processes listen on it too."""
    age, idle = settings.max_connection_age_seconds, settings.max_connection_idle_seconds
    return [
        # Unless it is to be shared, a second server on the port must fail to bind.
        ("grpc.so_reuseport", int(shared_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", most_streams(settings)),
        # A client that keeps to its streams may use all of them again before Python has cleared up.
        ("grpc.http.overload_protection", 1),
        ("grpc.http2.max_deallocating_streams", most_streams(settings)),
        *PENDING,
        ("grpc.max_allowed_incoming_connections", settings.connections_per_front_end),
        *CONNECTION_TIMES,
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.max_connection_idle_ms", int(idle * 1000) if idle else _NEVER_MS),
        # Beyond its age a connection takes no new calls. What runs on it goes on: no grace is set.
        ("grpc.max_connection_age_ms", int(age * 1000) if age else _NEVER_MS),
    ]


def public_server(
    settings: ServerSettings,
    services: Services,
    recording: Sequence[Interceptor],
    relay: Sequence[grpc.aio.ServerInterceptor] = (),
) -> tuple[grpc.aio.Server, Closing]:
    """A server that does not listen yet, with all but health; and what closes it.

    Args:
        recording: interceptors of telemetry; outermost.
        relay: interceptor of a further front end; innermost.
    """
    table = services.table
    closing = Closing(settings.resolved_concurrent_requests, table.open)
    token = settings.auth_token_file
    exempt = table.open | table.named(Access.ADAPTERS) | table.named(Access.ADMIN)
    plaintext = settings.loopback_address is not None
    authorising = []
    if token is not None:
        authorising = [AuthInterceptor(token, exempt, plaintext=plaintext)]
    authorising += authorising_operators(settings, table)
    inner = [closing, intake_of(settings, services)]
    layers = Layers([*recording, ErrorInterceptor(), *authorising, *inner])
    server = grpc.aio.server(
        interceptors=[layers, *relay],
        options=channel_options(settings, shared_port=settings.resolved_front_ends > 1),
    )
    add_methods(services, server)
    enable_reflection(table, server)
    return server, closing


def add_methods(services: Services, server: grpc.aio.Server) -> None:
    """Serve every rpc of the table that is not grpcio's own."""
    methods: dict[str, dict[str, Any]] = {}
    for row in services.table:
        if row.serve is None:
            continue
        _, make = ARITIES[row.takes_stream, row.streams]
        methods.setdefault(row.service, {})[row.name.rpartition("/")[2]] = make(
            functools.partial(row.serve, services),
            request_deserializer=row.request.FromString,
            response_serializer=row.response.SerializeToString,
        )
    handlers = [grpc.method_handlers_generic_handler(*each) for each in methods.items()]
    server.add_generic_rpc_handlers(tuple(handlers))


def authorising_operators(settings: ServerSettings, table: MethodTable) -> list[AuthInterceptor]:
    """What asks for the tokens of methods that are for operators, on every listener."""
    files = {Access.ADAPTERS: settings.adapter_token_file, Access.ADMIN: settings.admin_token_file}
    return [
        AuthInterceptor(file, only=table.named(access))
        for access, file in files.items()
        if file is not None
    ]


def bind(server: grpc.aio.Server, address: str, with_tls: grpc.ServerCredentials | None) -> int:
    """Listen on `address`; the port. Raises StartError."""
    try:
        if with_tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, with_tls)
    except (OSError, RuntimeError) as error:
        raise StartError(f"cannot listen on {address}: {reason(address, error)}") from error


def reason(address: str, error: Exception) -> str:
    """Why an address can't be had, in few words: gRPC does not say, so it is tried again."""
    try:
        if address.startswith("unix:"):
            _try_unix(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            _try_port(host.strip("[]"), int(port))
    except OSError as found:
        in_use = found.errno == errno.EADDRINUSE
        return "the address is in use" if in_use else found.strerror or str(found)
    return str(error)


def bind_all(
    server: grpc.aio.Server,
    address: str,
    settings: ServerSettings,
    with_tls: grpc.ServerCredentials | None,
) -> int:
    """Listen on `address`, whose port is returned, and on the settings' further ports.

    Raises StartError.
    """
    port = bind(server, address, with_tls)
    if settings.tgis_address is not None:
        bind(server, settings.tgis_address, with_tls)
    if settings.loopback_address is not None:
        bind(server, settings.loopback_address, None)
    return port


def check_ports(settings: ServerSettings) -> None:
    """Raise StartError if a port that front ends will share has another owner already.

    Sharing asks for nothing but the same user: without this look, two servers would split the
    clients of one port between them.
    """
    shared = (settings.address, settings.tgis_address, settings.loopback_address)
    for address in filter(None, shared):
        host, _, port = address.rpartition(":")
        try:
            _try_port(host.strip("[]"), int(port))
        except OSError as error:
            why = reason(address, error)
            raise StartError(f"cannot listen on {address}: {why}") from error


def _try_port(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def _try_unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(path)
    os.unlink(path)
