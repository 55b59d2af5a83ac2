"""What a server says is wrong."""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

#: The server's hint of when to call again, in its trailing metadata: milliseconds.
_PUSHBACK = "grpc-retry-pushback-ms"


class ServerError(Exception):
    """A call failed.

    Attributes:
        code: gRPC's status.
        message: what the server, or the transport, says of it.
        violations: (path of a field, what is wrong with it), where the request is at fault.
        retry_after: seconds after which the server wants the call again; None: it does not say.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        violations: tuple[tuple[str, str], ...] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}" if message else code.name)
        self.code = code
        self.message = message
        self.violations = violations
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: Any) -> ServerError:
        """From what grpc raises: a `grpc.RpcError` of a call, or a `grpc.aio.AioRpcError`."""
        hint = dict(error.trailing_metadata() or ()).get(_PUSHBACK, "")
        return cls(
            error.code(),
            " ".join((error.details() or "").split()),
            violations=_violations(error),
            retry_after=int(hint) / 1000 if str(hint).isdigit() else None,
        )


def _violations(error: Any) -> tuple[tuple[str, str], ...]:
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        # Details that contradict the status: the status alone is to be believed.
        return ()
    bad = error_details_pb2.BadRequest()
    return tuple(
        (violation.field, violation.description)
        for detail in (status.details if status else ())
        if detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad)
        for violation in bad.field_violations
    )
