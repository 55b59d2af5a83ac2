"""Reading requests: who is refused is refused without one, and what comes is parsed or blamed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from support.clients import floods
from support.clients.rpcs import Running, Scripted, serving
from support.waiting import until
from tokenpod.service.admission.admission import Admission
from tokenpod.service.admission.memory_budget import LateMessages, MemoryBudget
from tokenpod.service.calls.errors import ResourceExhausted, Unavailable
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.intake import Check, Intake, Parser, open_to_all
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.wire import MethodLimits, Size
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

INFO = "/generate.v3.TextGenerationService/Info"
GENERATE = "/generate.v3.TextGenerationService/Generate"


def behind(
    gate: Check = open_to_all, late: LateMessages | None = None, arrival: float = 60.0
) -> Any:
    """A server whose rpcs are read by an intake."""
    intake = Intake(TABLE.limits(), gate, late, arrival=arrival)
    return serving(servicer=Scripted(), interceptors=[ErrorInterceptor(), intake])


def closed(method: str, seconds: float | None) -> MemoryBudget | None:
    raise ResourceExhausted(f"{method} is full", limit="test", retry_after=1.0)


async def code(call: Any) -> grpc.StatusCode:
    return await call.code()  # type: ignore[no-any-return]


async def test_a_call_and_a_stream_are_served_as_without_it() -> None:
    async with behind() as running:
        assert (await running.stub.Info(pb.InfoRequest())).dtype == "float32"
        events = [event async for event in running.stub.Generate(pb.GenerateRequest(text="x"))]
        assert [event.WhichOneof("event") for event in events] == ["started", "tokens"]


async def test_a_call_whose_deadline_passed_in_the_queue_is_not_looked_at() -> None:
    asked: list[float | None] = []

    def gate(method: str, seconds: float | None) -> MemoryBudget | None:
        asked.append(seconds)
        return None

    async with behind(gate) as running:
        expiring = floods.call_headers(INFO) + floods.header("grpc-timeout", "50m")
        with floods.opened(int(running.address.rpartition(":")[2])) as connection:
            await asyncio.sleep(0.1)
            connection.sendall(floods.frame(floods.HEADERS, floods.END_HEADERS, 1, expiring))
            # Python is busy.
            time.sleep(0.5)  # noqa: ASYNC251
            assert (await running.stub.Info(pb.InfoRequest(), timeout=60)).dtype == "float32"
    (remaining,) = asked
    assert remaining is not None
    assert remaining > 30


async def test_streams_of_requests_that_stay_open_are_limited() -> None:
    """Each takes 30 kB for as long as its client likes; a connection may have an eighth of them."""
    path = next(row.name for row in TABLE if row.takes_stream)
    _, service, name = path.split("/")

    async def read(requests: AsyncIterator[Any], context: Any) -> None:
        async for _ in requests:
            pass

    handlers = {name: grpc.stream_stream_rpc_method_handler(read)}
    generic = grpc.method_handlers_generic_handler(service, handlers)
    intake = Intake(TABLE.limits(), most_streams=16)
    running_of = serving(handlers=[generic], interceptors=[ErrorInterceptor(), intake])
    async with running_of as running:
        open_ = running.channel.stream_stream(path)
        calls = {open_(timeout=60) for _ in range(3)}
        await until(lambda: any(call.done() for call in calls))
        (refused,) = (call for call in calls if call.done())
        assert await code(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 16, 2 of a connection" in await refused.details()
        for call in calls - {refused}:
            await call.done_writing()
            assert await code(call) is grpc.StatusCode.OK
        again = open_(timeout=60)
        await again.done_writing()
        assert await code(again) is grpc.StatusCode.OK


@pytest.mark.parametrize("path", [INFO, GENERATE])
async def test_who_is_refused_is_refused_before_there_is_a_message(path: str) -> None:
    async with behind(closed) as running:
        call = running.channel.stream_unary(path)(timeout=20)
        assert await code(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await call.details() == f"{path} is full"


@pytest.mark.parametrize("path", [INFO, GENERATE])
async def test_a_call_without_a_message_is_told_so(path: str) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        for never in ():
            yield never

    async with behind() as running:
        call = running.channel.stream_unary(path)(nothing(), timeout=20)
        assert await code(call) is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "request is missing: the call has no message"


async def test_a_message_that_never_comes_ends_its_call() -> None:
    async with behind(arrival=1.0) as running:
        call = running.channel.stream_unary(INFO)(timeout=20)
        assert await code(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "the request did not arrive within 1 s"
        assert (await running.stub.Info(pb.InfoRequest())).dtype == "float32"


async def test_a_message_may_take_longer_the_longer_its_method_lets_it_be() -> None:
    async with behind(arrival=0.6) as running:
        # The longest is 4 MiB, which counts as 8 s.
        call = running.channel.stream_unary(GENERATE)(timeout=20)
        assert await code(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "the request did not arrive within 9 s"


@pytest.mark.parametrize("data", [b"\x0a", b"\xff" * 20, b"\x42\x01\xff"])
async def test_what_is_no_message_is_an_invalid_argument(data: bytes) -> None:
    async with behind() as running:
        call = running.channel.unary_unary(GENERATE)(data, timeout=20)
        assert await code(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_is_parsed_only_if_it_may_be_that_long() -> None:
    parsed: list[bytes] = []

    class Request:
        DESCRIPTOR = pb.GenerateRequest.DESCRIPTOR

        @classmethod
        def parse(cls, data: bytes) -> str:
            parsed.append(data)
            return "parsed"

    parser = Parser.of(Request.parse, MethodLimits(1000, Size(fields=10, elements=10)))
    assert await parser.parse(b"\x48\x01" * 10) == "parsed"
    for refused in (b"\x48\x01" * 11, b"\x0a\xe8\x07" + b"x" * 1000):
        with pytest.raises(Exception, match="at most"):
            await parser.parse(refused)
    assert len(parsed) == 1


def admitting(messages: int) -> Admission:
    """Memory for so many messages of 1000 bytes."""
    admission = Admission(
        max_requests=999, max_queue_tokens=1, max_bytes=messages * 1000, max_message_bytes=1000
    )
    admission.closed = None
    return admission


def backend(admission: Admission) -> Backend:
    """One whose model is not ready."""
    generate = GenerateService(admission)
    return Backend(TABLE, admission, generate, healthy=lambda: True)


def counting(admission: Admission, arrival: float = 60.0) -> Any:
    """A server whose messages are counted."""
    return behind(backend(admission).check, admission.late, arrival)


@contextlib.asynccontextmanager
async def silent(running: Running, calls: int, path: str = GENERATE) -> AsyncIterator[list[Any]]:
    """A connection of its own with so many calls that send headers alone."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(running.address, options=options) as channel:
        yield [channel.stream_stream(path)(timeout=60) for _ in range(calls)]


async def told(running: Running) -> list[Any]:
    """What a call is answered whose message comes with its headers."""
    return [event async for event in running.stub.Generate(pb.GenerateRequest(text="x"))]


async def test_a_late_message_counts_as_the_longest_until_it_is_there() -> None:
    admission = admitting(9)
    async with counting(admission) as running, silent(running, 1) as (call,):
        await until(lambda: admission.memory.taken == 1000)
        await call.write(pb.GenerateRequest(text="x").SerializeToString())
        await call.done_writing()
        assert len([answer async for answer in call]) == 2
        assert admission.memory.taken == 0


async def test_a_message_that_comes_when_the_memory_is_taken_is_refused() -> None:
    admission = admitting(9)
    async with counting(admission) as running:
        lease = admission.memory.reserve(8990)
        with pytest.raises(grpc.aio.AioRpcError, match="this one needs") as refused:
            async for _ in running.stub.Generate(pb.GenerateRequest(text="x" * 100)):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        lease.resize(9000)
        # With nothing left no message is read.
        async with silent(running, 1) as (call,):
            assert await code(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        lease.release()
        assert len(await told(running)) == 2


async def test_calls_without_a_message_take_their_connections_part_and_no_others() -> None:
    admission = admitting(64)  # of which a connection's late messages may take 8
    async with counting(admission) as running, silent(running, 100) as calls:
        while admission.memory.taken < 8000:
            assert len(await told(running)) == 2
            await asyncio.sleep(0.02)
        async with silent(running, 1) as (other,):
            await until(lambda: admission.memory.taken == 9000)
            assert len(await told(running)) == 2
            await other.write(pb.GenerateRequest(text="x").SerializeToString())
            await other.done_writing()
            assert len([answer async for answer in other]) == 2
        refused = [call for call in calls if call.done()]
        assert len(refused) == 92
        for call in refused:
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "100 calls" not in await call.details()
            assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]


async def test_calls_without_a_message_on_many_connections_leave_half_of_the_memory() -> None:
    admission = admitting(64)
    async with counting(admission) as running, contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            await stack.enter_async_context(silent(running, 10))
        while admission.memory.taken < 32_000:
            assert len(await told(running)) == 2
            await asyncio.sleep(0.02)
        assert len(await told(running)) == 2
        assert admission.memory.taken == 32_000


async def test_calls_without_a_message_end_and_give_their_memory_back() -> None:
    admission = admitting(64)
    async with counting(admission, arrival=0.0) as running, silent(running, 8) as calls:
        ends = {await call.code() for call in calls}
        assert ends == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert admission.memory.taken == 0
        async with silent(running, 8):
            await until(lambda: admission.memory.taken == 8000)
        await until(lambda: admission.memory.taken == 0)


def test_the_gate_knows_a_start_a_drain_and_a_full_queue() -> None:
    admission = Admission(max_requests=1, max_queue_tokens=1)
    rpcs = backend(admission)
    tokens, prefill = GENERATE.replace("Generate", "Tokens"), INFO.replace("Info", "Prefill")
    for path in (GENERATE, tokens, prefill, INFO):
        with pytest.raises(Unavailable, match="not loaded"):
            rpcs.check(path)
    rpcs.check("/grpc.health.v1.Health/Check")
    admission.closed = None
    rpcs.check(GENERATE)
    with admission.enter():
        for path in (GENERATE, tokens):
            with pytest.raises(ResourceExhausted, match="at most 1"):
                rpcs.check(path)
    admission.drain()
    for path in (GENERATE, tokens):
        with pytest.raises(Unavailable, match="draining"):
            rpcs.check(path)
