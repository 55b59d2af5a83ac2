"""The client side of the command line: a channel to a server, and what its errors mean."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

Metadata = tuple[tuple[str, str], ...]

#: What grpcio says when it has no connection at all, as opposed to a server's own UNAVAILABLE.
_NO_CONNECTION = ("failed to connect", "DNS resolution failed", "Name resolution failure")


class RemoteError(Exception):
    """A call failed; the text is for the operator, a line for each fault."""


@dataclass(frozen=True, slots=True)
class Remote:
    """How to reach a server.

    Args:
        address: `host:port` or `unix:/path`.
        token: bearer token, or None.
        tls: encrypt; so do `ca`, `cert` and `key`.
        ca: authorities to trust (PEM) in place of the system's.
        cert, key: this client's certificate chain and key (PEM).
    """

    address: str
    token: str | None = None
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def metadata(self) -> Metadata:
        """What identifies us on every call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def open(self, *options: tuple[str, object]) -> grpc.aio.Channel:
        """A channel with these options besides ours. Needs a running event loop."""
        every = [("grpc.max_receive_message_length", -1), *options]
        if self.tls or self.ca or self.cert:
            credentials = grpc.ssl_channel_credentials(
                _pem(self.ca), _pem(self.key), _pem(self.cert)
            )
            return grpc.aio.secure_channel(self.address, credentials, every)
        return grpc.aio.insecure_channel(self.address, every)

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """An open channel. What fails within becomes a RemoteError; what runs is cancelled."""
        async with self.open() as channel:
            try:
                yield channel
            except grpc.aio.AioRpcError as error:
                raise RemoteError(describe(error, self.address)) from error


def describe(error: grpc.aio.AioRpcError, address: str) -> str:
    """What went wrong, for the operator: a line for each field that the server complains of."""
    text = " ".join((error.details() or "no reason given").split())
    if error.code() is grpc.StatusCode.UNAVAILABLE and text.startswith(_NO_CONNECTION):
        return f"can't reach {address}: {text.rpartition('last error: ')[2]}"
    violations = _violations(error)
    if violations:
        return "\n".join(f"{v.field} {v.description}" for v in violations)
    return f"{error.code().name}: {text}"


def _violations(error: grpc.aio.AioRpcError) -> list[error_details_pb2.BadRequest.FieldViolation]:
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # Details that contradict the status: the status alone is to be believed.
        return []
    bad = error_details_pb2.BadRequest()
    return [
        violation
        for detail in (status.details if status else ())
        if detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad)
        for violation in bad.field_violations
    ]


def _pem(path: Path | None) -> bytes | None:
    return path.read_bytes() if path else None
