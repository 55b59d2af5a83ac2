"""The server on the public port: the interceptors around every rpc, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from tokenpod.service.config import ServerSettings
from tokenpod.service.rpc.closing import Closing
from tokenpod.service.rpc.intake import intake_of
from tokenpod.service.rpc.interceptors import AuthInterceptor, ErrorInterceptor
from tokenpod.service.rpc.listen import channel_options
from tokenpod.service.rpc.methods import add_methods
from tokenpod.service.rpc.reflection import enable_reflection
from tokenpod.service.serving.backend import Backend


def public_server(
    settings: ServerSettings,
    backend: Backend,
    recording: Sequence[grpc.aio.ServerInterceptor],
    relay: Sequence[grpc.aio.ServerInterceptor] = (),
) -> tuple[grpc.aio.Server, Closing]:
    """A server that does not listen yet, with all but health; and what closes it.

    Args:
        settings: the operator's.
        backend: answers the rpcs.
        recording: of telemetry; outermost.
        relay: of a further front end; innermost.
    """
    table = backend.table
    closing = Closing(settings.resolved_concurrent_requests, table.open)
    token = settings.auth_token_file
    authorising = [AuthInterceptor(token, table.open)] if token is not None else []
    inner = [closing, intake_of(settings, backend), *relay]
    server = grpc.aio.server(
        interceptors=[*recording, ErrorInterceptor(), *authorising, *inner],
        options=channel_options(settings, shared_port=settings.resolved_front_ends > 1),
    )
    add_methods(backend, server)
    enable_reflection(table, server)
    return server, closing
