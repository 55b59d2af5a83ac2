"""What each exception tells a client."""

from __future__ import annotations

import base64
import re
import urllib.parse
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2

from tokenpod.core.outputs import Failure, FailureCode
from tokenpod.service.calls.errors import (
    DOMAIN,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    engine_failure,
)

EVERY = [
    (InvalidArgument("stopping.max_new_tokens", "is 0; at least 1"), "INVALID_ARGUMENT"),
    (ResourceExhausted("the queue is full", limit="max_requests"), "RESOURCE_EXHAUSTED"),
    (Unavailable("draining", retry_after=1.5), "UNAVAILABLE"),
    (NotFound("batch", "7"), "NOT_FOUND"),
    (FailedPrecondition("this pod is a follower"), "FAILED_PRECONDITION"),
    (DeadlineExceeded("the deadline has passed"), "DEADLINE_EXCEEDED"),
    (DataLoss("NaN"), "DATA_LOSS"),
    (Unauthenticated("no token"), "UNAUTHENTICATED"),
    (Internal(), "INTERNAL"),
]


def detail(error: ServiceError, kind: type[Any]) -> Any:
    """The one detail of a kind in the status that travels; None without."""
    found = []
    for packed in error.status().details:
        assert isinstance(packed, AnyMessage)
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    assert len(found) < 2
    return found[0] if found else None


@pytest.mark.parametrize(("error", "code"), EVERY, ids=[code for _, code in EVERY])
def test_every_error_has_its_code_its_text_and_a_reason(error: ServiceError, code: str) -> None:
    status = error.status()
    assert error.code is getattr(grpc.StatusCode, code)
    assert status.code == code_pb2.Code.Value(code) == error.code.value[0]
    assert status.message == error.message == str(error)
    info = detail(error, error_details_pb2.ErrorInfo)
    assert info.domain == DOMAIN
    assert re.fullmatch(r"[A-Z][A-Z_]+[A-Z]", info.reason)


def test_an_invalid_field_is_named_with_its_problem() -> None:
    error = InvalidArgument("sampling.top_p", "is 2; between 0 and 1")
    (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == "sampling.top_p"
    assert violation.description == "is 2; between 0 and 1"
    assert error.message == "sampling.top_p is 2; between 0 and 1"


@pytest.mark.parametrize("character", ["a", "\0", "é", "\U0001f600", "\ud800"])
def test_what_a_client_sees_of_an_error_does_not_grow_with_what_it_sent(character: str) -> None:
    """Beyond 8 KiB of metadata gRPC's clients see a code of their own in the place of ours."""
    text = character * 5000
    for error in (InvalidArgument("a.field", text), NotFound("adapter", text), DataLoss(text)):
        status = error.status()
        message = urllib.parse.quote(status.message.encode())
        assert len(message) + len(base64.b64encode(status.SerializeToString())) < 7500
        assert status.message.startswith(str(error)[:20])
        assert status.message.endswith("...")


def test_a_reached_limit_is_named() -> None:
    error = ResourceExhausted("128 requests wait", limit="max_concurrent_requests")
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert (violation.subject, violation.description) == (
        "max_concurrent_requests",
        "128 requests wait",
    )


def test_what_was_not_found_is_named() -> None:
    found = detail(NotFound("batch", "7"), error_details_pb2.ResourceInfo)
    assert (found.resource_type, found.resource_name) == ("batch", "7")


@pytest.mark.parametrize(("seconds", "milliseconds"), [(1.5, "1500"), (0.0, "0"), (0.25, "250")])
def test_a_retry_hint_is_a_detail_and_a_push_back(seconds: float, milliseconds: str) -> None:
    for error in (
        Unavailable("starting", retry_after=seconds),
        ResourceExhausted("full", limit="queue", retry_after=seconds),
    ):
        delay = detail(error, error_details_pb2.RetryInfo).retry_delay
        assert delay.ToTimedelta().total_seconds() == seconds
        assert list(error.trailing_metadata()) == [("grpc-retry-pushback-ms", milliseconds)]


def test_without_a_retry_hint_there_is_no_push_back() -> None:
    error = Unavailable("for ever")
    assert detail(error, error_details_pb2.RetryInfo) is None
    assert not error.trailing_metadata()


def test_an_internal_error_tells_an_id_and_nothing_else() -> None:
    first, second = Internal(), Internal()
    assert re.fullmatch(r"[0-9a-f]{12}", first.error_id)
    assert first.error_id != second.error_id
    assert first.message == f"internal error {first.error_id}; the server's log has the details"


@pytest.mark.parametrize("code", list(FailureCode))
def test_every_failure_of_the_engine_has_its_status(code: FailureCode) -> None:
    error = engine_failure(Failure(3, code, "why"))
    # It is one sequence's, where UNAVAILABLE is the engine's.
    name = "UNAVAILABLE" if code is FailureCode.COMPILER_LOST else code.name
    assert error.code is getattr(grpc.StatusCode, name)
    assert "why" in error.message
    retries = name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
    assert (error.retry_after is not None) is retries
