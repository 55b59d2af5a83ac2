"""What goes wrong, in the words and codes that a client gets.

Every exception here knows its gRPC status, its `google.rpc` details and, where trying again can
help, after how long. docs/contract.md lists which code means what.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokenpod.core.outputs import Failure, FailureCode

#: `google.rpc.ErrorInfo.domain`.
DOMAIN = "tokenpod"
#: Seconds after which a client should try again that is refused for want of room, or for a moment.
RETRY_SECONDS = 1.0
PUSHBACK_KEY = "grpc-retry-pushback-ms"
#: UTF-8 bytes of a text in an error. A status has a message three times, in percent encoding and in
#: base64, and gRPC's clients refuse more than 8 KiB of metadata: they would see another code.
_MOST_BYTES = 800

#: Answers that are kept, since a flood of refusals says the same things again and again.
_KEPT_ANSWERS = 1024

Metadata = Sequence[tuple[str, str]]
#: What a call ends with, besides its code and text.
Trailing = tuple[tuple[str, str | bytes], ...]


def _packed(detail: Message) -> AnyMessage:
    url = f"type.googleapis.com/{detail.DESCRIPTOR.full_name}"
    return AnyMessage(type_url=url, value=detail.SerializeToString())


@functools.lru_cache
def _info(reason: str) -> AnyMessage:
    return _packed(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))


def _delay(nanoseconds: int) -> AnyMessage:
    delay = Duration()
    delay.FromNanoseconds(nanoseconds)
    return _packed(error_details_pb2.RetryInfo(retry_delay=delay))


def bounded(text: str) -> str:
    """A text as an error can hold it, whatever a client has put into it: short, valid UTF-8."""
    data = text.encode(errors="replace")
    if len(data) <= _MOST_BYTES:
        return data.decode()
    return data[:_MOST_BYTES].decode(errors="ignore") + "..."


class ServiceError(Exception):
    """A failure that is reported to the client.

    Args:
        message: for the person who reads it; never paths, addresses or prompts.
        retry_after: seconds after which the same call may succeed; None: it will not by itself.
        reason: `ErrorInfo.reason`, for programs.
        label: the same for metrics, in lower case; says more where one reason has several causes.
    """

    code = grpc.StatusCode.UNKNOWN
    reason = "UNKNOWN"

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        self.message = bounded(message)
        super().__init__(self.message)
        self.retry_after = retry_after

    @property
    def label(self) -> str:
        """Why, as metrics count it: one of few words."""
        return self.reason.lower()

    def details(self) -> list[AnyMessage]:
        """The `google.rpc` messages that say more."""
        found = [_info(self.reason)]
        if self.retry_after is not None:
            found.append(_delay(int(self.retry_after * 1e9)))
        return found

    def trailing_metadata(self) -> Metadata:
        """gRPC clients' own retry policies obey the push-back."""
        if self.retry_after is None:
            return ()
        return ((PUSHBACK_KEY, str(int(self.retry_after * 1000))),)

    def status(self) -> status_pb2.Status:
        """`google.rpc.Status`, what travels in `grpc-status-details-bin`."""
        number: int = self.code.value[0]
        return status_pb2.Status(code=number, message=self.message, details=self.details())

    def answer(self) -> Trailing:
        """The trailing metadata of a call that ends with it: `status` and what clients obey."""
        status = rpc_status.to_status(self.status())
        return (*status.trailing_metadata, *self.trailing_metadata())


class FieldError(ServiceError):
    """Something about a field: `google.rpc.BadRequest` names it."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = bounded(problem)

    def rename(self, field: str) -> None:
        """Name the field as another message's, or in another protocol."""
        self.field = field
        self.message = bounded(f"{field} {self.problem}")

    def details(self) -> list[AnyMessage]:
        """The violation first."""
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=self.field, description=self.problem)
        return [_packed(bad), *super().details()]


class InvalidArgument(FieldError):
    """A field is wrong."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"


class Unimplemented(FieldError):
    """A field asks for what this server does not do yet."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NOT_BUILT"


class ResourceExhausted(ServiceError):
    """A queue is full or a batch does not fit; `limit` names which limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "LIMIT_REACHED"

    def __init__(self, message: str, *, limit: str, retry_after: float | None = None) -> None:
        super().__init__(message, retry_after=retry_after)
        self.limit = limit

    @property
    def label(self) -> str:
        """The limit that was reached."""
        return self.limit.replace(" ", "_")

    def details(self) -> list[AnyMessage]:
        """The limit first."""
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=self.limit, description=self.message)
        return [_packed(quota), *super().details()]

    def answer(self) -> Trailing:
        """As of every error, made once for all calls that are refused alike."""
        return _refusal(self.message, self.limit, self.retry_after)


@functools.lru_cache(_KEPT_ANSWERS)
def _refusal(message: str, limit: str, retry_after: float | None) -> Trailing:
    return ServiceError.answer(ResourceExhausted(message, limit=limit, retry_after=retry_after))


class Unavailable(ServiceError):
    """Starting, draining, or a part is lost: safe to retry."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"

    def __init__(
        self, message: str, *, retry_after: float | None = None, state: str = "unavailable"
    ) -> None:
        super().__init__(message, retry_after=retry_after)
        self._state = state

    @property
    def label(self) -> str:
        """The pod's state: `starting`, `draining`, `stalled`, or `unavailable`."""
        return self._state


class ResourceError(ServiceError):
    """Something that a call names, which `google.rpc.ResourceInfo` repeats."""

    def __init__(self, kind: str, name: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = bounded(name)

    def details(self) -> list[AnyMessage]:
        """The resource first."""
        resource = error_details_pb2.ResourceInfo(
            resource_type=self.kind, resource_name=self.name, description=self.message
        )
        return [_packed(resource), *super().details()]


class NotFound(ResourceError):
    """No batch, adapter or model of that name."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"

    def __init__(self, kind: str, name: str, message: str | None = None) -> None:
        super().__init__(kind, name, message or f"there is no {kind} {name!r}")


class AlreadyExists(ResourceError):
    """A call of the same name and caller is under way."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "UNDER_WAY"


class FailedPrecondition(ServiceError):
    """The server is not in the state that the call needs: a follower, a feature that is off."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class DeadlineExceeded(ServiceError):
    """The client's deadline has passed, or can't be met any more."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class DataLoss(ServiceError):
    """The model computed NaN or Inf for this request; others are not affected."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "NOT_A_NUMBER"


class Unauthenticated(ServiceError):
    """No token, or one that this server does not know."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "BAD_TOKEN"


class Internal(ServiceError):
    """A fault of ours. The client gets an id and nothing else; the log has the rest under it.

    Args:
        error_id: of the engine, which has logged it; empty: a new one, under which the caller logs.
    """

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL"

    def __init__(self, error_id: str = "") -> None:
        self.error_id = error_id or secrets.token_hex(6)
        super().__init__(f"internal error {self.error_id}; the server's log has the details")


def engine_failure(failure: Failure) -> ServiceError:
    """A failure of the engine as the client's error."""
    match failure.code:
        case FailureCode.RESOURCE_EXHAUSTED:
            limit = "max_batch_total_tokens"
            return ResourceExhausted(failure.message, limit=limit, retry_after=RETRY_SECONDS)
        case FailureCode.UNAVAILABLE | FailureCode.COMPILER_LOST:
            return Unavailable(failure.message, retry_after=RETRY_SECONDS)
        case FailureCode.INVALID_ARGUMENT:
            return InvalidArgument("request", failure.message)
        case FailureCode.NOT_FOUND:
            return NotFound("adapter", "", failure.message)
        case FailureCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(failure.message)
        case FailureCode.DATA_LOSS:
            return DataLoss(failure.message)
        case FailureCode.INTERNAL:
            return Internal(failure.message)
