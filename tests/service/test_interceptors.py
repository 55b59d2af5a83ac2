"""Errors and tokens, over real sockets, for every kind of handler."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from support.clients.public_api import violations
from support.clients.rpcs import KINDS, Act, Scripted, arities, call_kind, nothing, outlast, serving
from tokenpod.service.calls.errors import InvalidArgument, Unavailable
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import AuthInterceptor, ErrorInterceptor
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING


async def failure(act: Act, kind: str = "unary_unary", **call: Any) -> grpc.aio.AioRpcError:
    """The status that a call ends with when its handler does `act`."""
    async with serving(handlers=[arities(act)], interceptors=[ErrorInterceptor()]) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call_kind(running.channel, kind, **call)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_answers_as_without_interceptors(kind: str) -> None:
    async with serving(handlers=[arities(nothing)]) as bare:
        expected = await call_kind(bare.channel, kind)
    async with serving(handlers=[arities(nothing)], interceptors=[ErrorInterceptor()]) as running:
        assert await call_kind(running.channel, kind) == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_error_arrives_with_details(kind: str) -> None:
    async def invalid(context: Any) -> None:
        raise InvalidArgument("sampling.n", "is 9; at most 4")

    error = await failure(invalid, kind)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.n is 9; at most 4"
    assert violations(error) == {"sampling.n": "is 9; at most 4"}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_push_back_arrives_once_as_metadata_and_as_a_detail(kind: str) -> None:
    async def busy(context: Any) -> None:
        raise Unavailable("the server is draining", retry_after=2.0)

    error = await failure(busy, kind)
    trailing = [value for key, value in error.trailing_metadata() if key.endswith("pushback-ms")]
    assert trailing == ["2000"]
    retry = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    assert status is not None
    assert sum(packed.Unpack(retry) for packed in status.details) == 1
    assert retry.retry_delay.seconds == 2


class Message:
    """Stands for megabytes that a call has read."""


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_failed_call_has_read_is_let_go_at_once(kind: str) -> None:
    left: list[weakref.ref[Message]] = []

    async def fail(context: Any) -> None:
        message = Message()
        left.append(weakref.ref(message))
        try:
            raise KeyError(message)
        except KeyError as error:
            raise Unavailable("x") from error

    gc.disable()
    try:
        await failure(fail, kind)
        assert left[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bug", [ValueError, KeyError, StopAsyncIteration, RuntimeError, OSError])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_tells_the_client_an_id_and_the_log_the_rest(
    kind: str, bug: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(context: Any) -> None:
        raise bug("/etc/secret.sock")

    with caplog.at_level(logging.ERROR, "tokenpod.rpc"):
        error = await failure(fail, kind)
    assert error.code() is grpc.StatusCode.INTERNAL
    text = error.details() or ""
    told = re.fullmatch(r"internal error ([0-9a-f]{12}); the server's log has the details", text)
    assert told
    assert b"secret" not in repr(error.trailing_metadata()).encode()
    (record,) = [record for record in caplog.records if record.name == "tokenpod.rpc"]
    assert record.error_id == told[1]  # type: ignore[attr-defined]
    assert "Traceback" in caplog.text
    assert "/etc/secret.sock" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
async def test_an_abort_passes_untouched(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def abort(context: Any) -> None:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "as I say", (("key", "value"),))

    error = await failure(abort, kind)
    assert (error.code(), error.details()) == (grpc.StatusCode.OUT_OF_RANGE, "as I say")
    assert ("key", "value") in tuple(error.trailing_metadata())
    assert not [record for record in caplog.records if record.name == "tokenpod.rpc"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_ends_the_handler_and_is_no_fault(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def forever(context: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async with serving(handlers=[arities(forever)], interceptors=[ErrorInterceptor()]) as running:
        late = await outlast(
            lambda seconds: call_kind(running.channel, kind, timeout=seconds), begun
        )
        await asyncio.wait_for(ended.wait(), 60)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not [record for record in caplog.records if record.name == "tokenpod.rpc"]


@pytest.mark.parametrize("how", ["cancel", "hang up"])
async def test_a_client_that_leaves_ends_the_handler_and_is_no_fault(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def forever(context: Any) -> None:
        await asyncio.sleep(60)

    servicer = Scripted(forever)
    async with serving(servicer=servicer, interceptors=[ErrorInterceptor()]) as running:
        stream = running.stub.Generate(pb.GenerateRequest(text="x"))
        await stream.read()
        if how == "cancel":
            stream.cancel()
        else:
            await running.channel.close()
        await asyncio.wait_for(servicer.ended.wait(), 60)
    assert not [record for record in caplog.records if record.name == "tokenpod.rpc"]


async def test_a_client_that_leaves_between_messages_ends_the_handler_too() -> None:
    """The generator is then suspended at a yield, in a write that nobody reads."""
    ended = asyncio.Event()

    class Flooding(Scripted):
        async def Generate(self, request: Any, context: Any) -> Any:
            try:
                while True:
                    yield pb.GenerateResponse(tokens=pb.TokenDelta(text="x" * 100_000))
            finally:
                ended.set()

    async with serving(servicer=Flooding(), interceptors=[ErrorInterceptor()]) as running:
        stream = running.stub.Generate(pb.GenerateRequest(text="x"))
        await stream.read()
        await asyncio.sleep(0.2)
        stream.cancel()
        await asyncio.wait_for(ended.wait(), 60)


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(interceptors=[ErrorInterceptor()]) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.channel.unary_unary("/no.Such/Method")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- auth --------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("first-token\n\n  second-token  \n")
    return path


def bearer(token: str, scheme: str = "Bearer") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"{scheme} {token}"),)


async def code(channel: grpc.aio.Channel, metadata: Any = (), kind: str = "unary_unary") -> Any:
    try:
        await call_kind(channel, kind, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ((), "UNAUTHENTICATED"),
        (bearer("wrong"), "UNAUTHENTICATED"),
        (bearer("first-toke"), "UNAUTHENTICATED"),
        (bearer(""), "UNAUTHENTICATED"),
        (bearer("first-token", "Basic"), "UNAUTHENTICATED"),
        (bearer("first-token"), "OK"),
        (bearer("second-token"), "OK"),
        (bearer("first-token", "bearer"), "OK"),
        ((*bearer("first-token"), *bearer("first-token")), "UNAUTHENTICATED"),
        ((*bearer("wrong"), *bearer("first-token")), "UNAUTHENTICATED"),
        ((*bearer("first-token"), *bearer("wrong")), "UNAUTHENTICATED"),
    ],
)
async def test_only_a_known_token_lets_a_call_pass(
    tokens: Path, metadata: Any, expected: str
) -> None:
    interceptors = [ErrorInterceptor(), AuthInterceptor(tokens)]
    async with serving(handlers=[arities(nothing)], interceptors=interceptors) as running:
        assert (await code(running.channel, metadata)).name == expected


@pytest.mark.parametrize("kind", KINDS)
async def test_a_refused_call_never_reaches_its_handler(tokens: Path, kind: str) -> None:
    reached = []

    async def reach(context: Any) -> None:
        reached.append(context)

    async with serving(
        handlers=[arities(reach)], interceptors=[ErrorInterceptor(), AuthInterceptor(tokens)]
    ) as running:
        assert (await code(running.channel, (), kind)).name == "UNAUTHENTICATED"
        assert not reached
        assert (await code(running.channel, bearer("first-token"), kind)).name == "OK"
        assert reached


async def test_a_refusal_says_what_is_missing_but_no_token(tokens: Path) -> None:
    async with serving(
        handlers=[arities(nothing)], interceptors=[ErrorInterceptor(), AuthInterceptor(tokens)]
    ) as running:
        with pytest.raises(grpc.aio.AioRpcError, match="has no token") as missing:
            await call_kind(running.channel, "unary_unary")
        with pytest.raises(grpc.aio.AioRpcError, match="not known") as wrong:
            await call_kind(running.channel, "unary_unary", metadata=bearer("guess"))
    assert "authorization: Bearer TOKEN" in (missing.value.details() or "")
    assert "guess" not in (wrong.value.details() or "")


async def test_a_rotated_file_counts_at_once(tokens: Path) -> None:
    interceptors = [ErrorInterceptor(), AuthInterceptor(tokens)]
    async with serving(handlers=[arities(nothing)], interceptors=interceptors) as running:
        assert (await code(running.channel, bearer("first-token"))).name == "OK"
        # As kubelet does: a new file takes the place of the old one.
        fresh = tokens.with_name("fresh")
        fresh.write_text("third-token\n")
        os.replace(fresh, tokens)
        assert (await code(running.channel, bearer("first-token"))).name == "UNAUTHENTICATED"
        assert (await code(running.channel, bearer("third-token"))).name == "OK"


async def test_a_file_that_is_away_keeps_its_tokens_and_is_told_of_once(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interceptors = [ErrorInterceptor(), AuthInterceptor(tokens)]
    async with serving(handlers=[arities(nothing)], interceptors=interceptors) as running:
        assert (await code(running.channel, bearer("first-token"))).name == "OK"
        os.rename(tokens, f"{tokens}-away")
        for _ in range(5):
            assert (await code(running.channel, bearer("first-token"))).name == "OK"
            assert (await code(running.channel, bearer("wrong"))).name == "UNAUTHENTICATED"
        os.rename(f"{tokens}-away", tokens)
        assert (await code(running.channel, bearer("first-token"))).name == "OK"
    assert "Traceback" not in caplog.text
    told = [record.message for record in caplog.records if record.name == "tokenpod.rpc"]
    assert [text.partition(";")[0] for text in told] == [
        "the token file can't be read: No such file or directory",
        "the token file is good again",
    ]


async def test_an_empty_token_file_lets_nobody_in() -> None:
    interceptors = [ErrorInterceptor(), AuthInterceptor(Path(os.devnull))]
    async with serving(handlers=[arities(nothing)], interceptors=interceptors) as running:
        assert (await code(running.channel, bearer(""))).name == "UNAUTHENTICATED"


async def test_probes_need_no_token_and_watch_works_through_all_interceptors(
    tokens: Path,
) -> None:
    board = HealthBoard()

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, ())

    async with serving(
        prepare=prepare, interceptors=[ErrorInterceptor(), AuthInterceptor(tokens, TABLE.open)]
    ) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="liveness")
        assert (await stub.Check(request)).status == SERVING
        watch = stub.Watch(request)
        assert (await watch.read()).status == SERVING
        watch.cancel()
