"""What a front end listens on, and what of that can go wrong at start."""

from __future__ import annotations

import errno
import os
import socket

import grpc

from tokenpod.config import ServerSettings

#: gRPC's own "never", for times in milliseconds.
_NEVER_MS = 2**31 - 1


class StartError(Exception):
    """The server cannot start; the text is one line for the operator."""


def channel_options(settings: ServerSettings, *, shared_port: bool) -> list[tuple[str, int]]:
    """gRPC's options of the public server; `shared_port`: other processes listen on it too."""
    age = settings.max_connection_age_seconds
    return [
        # Unless it is to be shared, a second server on the port must fail to bind.
        ("grpc.so_reuseport", int(shared_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(settings.keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.max_connection_age_ms", int(age * 1000) if age else _NEVER_MS),
        ("grpc.max_connection_age_grace_ms", 600_000),
    ]


def credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """TLS as the operator wants it; raises StartError for a file that cannot be read."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
        client_ca = settings.tls_client_ca.read_bytes() if settings.tls_client_ca else None
    except OSError as error:
        raise StartError(f"cannot read {error.filename}: {error.strerror}") from error
    return grpc.ssl_server_credentials([pair], client_ca, client_ca is not None)


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


def check_port(settings: ServerSettings) -> None:
    """Raise StartError if a port that front ends will share has another owner already.

    Sharing asks for nothing but the same user: without this look, two servers would split the
    clients of one port between them.
    """
    try:
        _try_port(settings.hostname, settings.port)
    except OSError as error:
        why = reason(settings.address, error)
        raise StartError(f"cannot listen on {settings.address}: {why}") from error


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
