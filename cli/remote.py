"""A channel to a server, and what its errors mean. It imports grpc, which takes its time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from tokenpod_client.aio import AsyncClient
from tokenpod_client.channel import OPTIONS
from tokenpod_client.cli.connection import Remote
from tokenpod_client.errors import ServerError

#: What grpcio says when it has no connection at all, as opposed to a server's own UNAVAILABLE.
_NO_CONNECTION = ("failed to connect", "errors resolving", "DNS resolution failed")
#: What stands before the reason then: where it was tried, in gRPC's own words.
_ATTEMPT = re.compile(
    r"^.*last error: |^.*lookup failed for \S+: |[A-Z_]+: (?:ipv4|ipv6|unix):\S+: "
    r"|Failed to connect to remote host: |connect failed: addr: \S+ error: |\]$"
)


class RemoteError(Exception):
    """A call failed; the text is for the operator, a line for each fault."""


def open_channel(remote: Remote, *options: tuple[str, object]) -> grpc.aio.Channel:
    """A channel with these options besides ours. Needs a running event loop."""
    every, credentials = [*OPTIONS, *options], credentials_of(remote)
    if credentials is None:
        return grpc.aio.insecure_channel(remote.address, every)
    return grpc.aio.secure_channel(remote.address, credentials, every)


def credentials_of(remote: Remote) -> grpc.ChannelCredentials | None:
    """Of TLS; None: plaintext."""
    if not (remote.tls or remote.tls_ca or remote.tls_cert):
        return None
    files = (remote.tls_ca, remote.tls_key, remote.tls_cert)
    return grpc.ssl_channel_credentials(*(f.read_bytes() if f else None for f in files))


def client_of(remote: Remote, *, attempts: int) -> AsyncClient:
    """The library's client, which tries a call so often. Needs a running event loop."""
    return AsyncClient(
        remote.address,
        token=remote.token,
        credentials=credentials_of(remote),
        deadline=remote.deadline,
        attempts=attempts,
    )


@asynccontextmanager
async def connected(remote: Remote) -> AsyncIterator[AsyncClient]:
    """The library's client, which tries once. What fails within becomes a RemoteError."""
    async with client_of(remote, attempts=1) as client:
        try:
            yield client
        except ServerError as error:
            raise RemoteError(describe(error, remote.address)) from error


@asynccontextmanager
async def calling(remote: Remote) -> AsyncIterator[grpc.aio.Channel]:
    """An open channel. What fails within becomes a RemoteError; what runs is cancelled."""
    async with open_channel(remote) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise RemoteError(describe(ServerError.of(error), remote.address)) from error


def describe(found: ServerError, address: str) -> str:
    """What went wrong, for the operator: a line for each field that the server complains of."""
    text = found.message
    if found.code is grpc.StatusCode.UNAVAILABLE and text.startswith(_NO_CONNECTION):
        return f"can't reach {address}: {_ATTEMPT.sub('', text)}"
    if found.violations:
        return "\n".join(f"{field} {problem}" for field, problem in found.violations)
    if not text:
        return f"{address} answered {found.code.name} and does not say why"
    return str(found)
