"""Reading requests: who is refused is refused without one, and what comes is parsed or blamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rpcs import Scripted, serving

from tokenpod.service.config import ServerSettings
from tokenpod.service.dialects.registry import TABLE
from tokenpod.service.rpc.admission import Admission
from tokenpod.service.rpc.errors import ResourceExhausted, Unavailable
from tokenpod.service.rpc.intake import Check, Intake, Parser, open_to_all
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.memory_budget import Lease
from tokenpod.service.rpc.methods import MethodLimits
from tokenpod.service.rpc.wire import Size
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.telemetry.recorder import Telemetry
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

INFO = "/generate.v3.TextGenerationService/Info"
GENERATE = "/generate.v3.TextGenerationService/Generate"


def behind(gate: Check = open_to_all, arrival: float = 60.0) -> Any:
    """A server whose rpcs are read by an intake."""
    intake = Intake(TABLE.limits(), gate, arrival)
    return serving(servicer=Scripted(), interceptors=[ErrorInterceptor(), intake])


def closed(method: str, seconds: float | None) -> Lease | None:
    raise ResourceExhausted(f"{method} is full", limit="test", retry_after=1.0)


async def code(call: Any) -> grpc.StatusCode:
    return await call.code()  # type: ignore[no-any-return]


async def test_a_call_and_a_stream_are_served_as_without_it() -> None:
    async with behind() as running:
        assert (await running.stub.Info(pb.InfoRequest())).dtype == "float32"
        events = [event async for event in running.stub.Generate(pb.GenerateRequest(text="x"))]
        assert [event.WhichOneof("event") for event in events] == ["started", "tokens"]


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


def narrow() -> Admission:
    """Memory for one message that has not come, and another small one."""
    admission = Admission(
        max_requests=9, max_queue_tokens=1, max_bytes=5000, max_message_bytes=4000
    )
    admission.closed = None
    return admission


async def test_memory_for_a_message_is_kept_until_the_message_has_been_parsed() -> None:
    admission, asked = narrow(), asyncio.Event()
    service = backend(admission)

    def gate(method: str, seconds: float | None) -> Lease | None:
        asked.set()
        return service.check(method, seconds)

    async with behind(gate) as running:
        silent = running.channel.stream_stream(GENERATE)(timeout=60)
        await asyncio.wait_for(asked.wait(), 30)
        assert admission.memory.taken == 4000
        await silent.write(pb.GenerateRequest(text="x").SerializeToString())
        await silent.done_writing()
        assert len([answer async for answer in silent]) == 2
        assert admission.memory.taken == 0


def backend(admission: Admission) -> Backend:
    """One whose model is not ready."""
    generate = GenerateService(admission, Telemetry.start(ServerSettings()))
    return Backend(TABLE, admission, generate, healthy=lambda: True)


def test_calls_that_have_not_sent_their_messages_count_as_large_as_these_may_be() -> None:
    admission = narrow()
    service = backend(admission)
    lease = service.check(GENERATE)
    assert lease is not None
    with pytest.raises(ResourceExhausted, match="--max-front-end-bytes"):
        service.check(GENERATE)
    lease.resize(900)
    second = service.check(GENERATE)
    assert second is not None
    lease.release()
    second.release()
    assert admission.memory.taken == 0


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
