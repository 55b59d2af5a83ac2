"""gRPC between ranks: options and credentials of both ends."""

from __future__ import annotations

from pathlib import Path

import grpc

from tokenpod.core.errors import EngineError
from tokenpod.core.placement import ShardTls

SERVICE = "tokenpod.shard.v1.PlanService"
METHOD = f"/{SERVICE}/Follow"

#: A step's plan can hold many prompts.
_ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
#: A second server on the port must fail to bind.
SERVER_OPTIONS = [*_ANY_SIZE, ("grpc.so_reuseport", 0)]
#: A leader that comes back is to be found at once, through no proxy of the environment.
CHANNEL_OPTIONS = [
    *_ANY_SIZE,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


def server_credentials(tls: ShardTls) -> grpc.ServerCredentials:
    """Followers must show a certificate of the same authorities. Raises EngineError."""
    cert, key, ca = _read(tls)
    return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)


def channel(address: str, tls: ShardTls | None) -> grpc.Channel:
    """A channel to the leader at `address`. Raises EngineError."""
    if tls is None:
        return grpc.insecure_channel(address, CHANNEL_OPTIONS)
    cert, key, ca = _read(tls)
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(ca, key, cert), CHANNEL_OPTIONS
    )


def _read(tls: ShardTls) -> tuple[bytes, bytes, bytes]:
    try:
        return Path(tls.cert).read_bytes(), Path(tls.key).read_bytes(), Path(tls.ca).read_bytes()
    except OSError as error:
        raise EngineError(f"cannot read {error.filename}: {error.strerror}") from error
