"""Calls that one front end hands on to another: nothing of them is lost, and strangers get none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from support.clients.rpcs import outlast
from tokenpod.service.admission.admission import Admission
from tokenpod.service.calls.errors import Unavailable
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.methods import SMALL, Method, MethodTable
from tokenpod.service.rpc.relay import SECRET_KEY, Relay, RelayGuard, serve_relay
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

SECRET = "between us"
ROWS = MethodTable(
    [
        Method("/shard.Service/Once", SMALL),
        Method("/shard.Service/Stream", SMALL, streams=True),
        Method("/shard.Service/Own", SMALL, relayed=False),
    ]
)


class First:
    """The first front end, of which one sees what reached it."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.remaining: float | None = None
        self.called = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def once(self, request: bytes, context: Any) -> bytes:
        self.metadata = dict(context.invocation_metadata())
        self.remaining = context.time_remaining()
        if request == b"unknown":
            raise Unavailable("the batch is elsewhere", retry_after=2.0)
        if request == b"slow":
            self.called.set()
            try:
                await asyncio.sleep(60)
            finally:
                self.cancelled.set()
        await context.send_initial_metadata((("model", "demo"), ("raw-bin", b"\x00\xff")))
        context.set_trailing_metadata((("took", "3"),))
        return request[::-1]

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            for byte in request:
                yield bytes([byte])
            if request.endswith(b"..."):
                await asyncio.sleep(60)
        finally:
            self.cancelled.set()


class Both:
    """A channel to a further front end, and what is behind it."""

    def __init__(self, channel: grpc.aio.Channel, first: First) -> None:
        self.first = first
        self.once: Any = channel.unary_unary("/shard.Service/Once")
        self.stream: Any = channel.unary_stream("/shard.Service/Stream")
        self.own: Any = channel.unary_unary("/shard.Service/Own")


async def own(request: bytes, context: Any) -> bytes:
    return b"mine"


@contextlib.asynccontextmanager
async def two_front_ends(secret: str = SECRET) -> AsyncIterator[Both]:
    first = First()
    behind = grpc.aio.server(interceptors=[ErrorInterceptor(), RelayGuard(SECRET)])
    behind.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "shard.Service",
                {
                    "Once": grpc.unary_unary_rpc_method_handler(first.once),
                    "Stream": grpc.unary_stream_rpc_method_handler(first.stream),
                },
            ),
        )
    )
    port = behind.add_insecure_port("127.0.0.1:0")
    await behind.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as between:
        relay = Relay(between, ROWS, secret=secret)
        front = grpc.aio.server(interceptors=[ErrorInterceptor(), relay])
        handler = {"Own": grpc.unary_unary_rpc_method_handler(own)}
        front.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("shard.Service", handler),)
        )
        port = front.add_insecure_port("127.0.0.1:0")
        await front.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Both(channel, first)
        await front.stop(None)
    await behind.stop(None)


async def test_a_call_and_its_answer_pass_with_metadata_and_deadline() -> None:
    async with two_front_ends() as both:
        trace = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        call = both.once(b"abc", timeout=20, metadata=(trace, ("tenant", "a")))
        assert await call == b"cba"
        initial = dict(await call.initial_metadata())
        assert (initial["model"], initial["raw-bin"]) == ("demo", b"\x00\xff")
        assert dict(await call.trailing_metadata())["took"] == "3"
        assert both.first.metadata["traceparent"] == trace[1]
        assert both.first.metadata["tenant"] == "a"
        assert both.first.remaining is not None
        # gRPC rounds it up on its way, to a tenth of a second.
        assert 10 < both.first.remaining <= 20.1


async def test_what_a_process_serves_itself_is_not_passed_on() -> None:
    async with two_front_ends() as both:
        assert await both.own(b"") == b"mine"


async def test_an_error_arrives_with_its_details() -> None:
    async with two_front_ends() as both:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await both.once(b"unknown")
        assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
        assert unknown.value.details() == "the batch is elsewhere"
        trailing = dict(unknown.value.trailing_metadata())
        assert "grpc-status-details-bin" in trailing
        assert trailing["grpc-retry-pushback-ms"] == "2000"


async def test_a_stream_passes_message_by_message() -> None:
    async with two_front_ends() as both:
        assert [message async for message in both.stream(b"xyz")] == [b"x", b"y", b"z"]
        call = both.stream(b"x...")
        assert [await call.read() for _ in range(4)] == [b"x", b".", b".", b"."]
        both.first.cancelled.clear()
        call.cancel()
        await asyncio.wait_for(both.first.cancelled.wait(), 60)


async def test_a_client_that_goes_away_takes_the_relayed_call_with_it() -> None:
    async with two_front_ends() as both:
        late = await outlast(lambda seconds: both.once(b"slow", timeout=seconds), both.first.called)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(both.first.cancelled.wait(), 60)


async def test_a_clients_word_is_not_taken_for_the_secret() -> None:
    async with two_front_ends(secret="a guess") as both:
        for claimed in ((), ((SECRET_KEY, "another guess"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await both.once(b"abc", metadata=claimed)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert both.first.metadata == {}


@contextlib.asynccontextmanager
async def real_relay() -> AsyncIterator[tuple[str, str]]:
    """The first front end's own, before the model is ready: its address and its secret."""
    admission = Admission(max_requests=1, max_queue_tokens=1)
    generate = GenerateService(admission)
    backend = Backend(TABLE, admission, generate, healthy=lambda: True)
    settings = ServerSettings(front_ends=2, max_message_bytes=1024 * 1024)
    server, address, secret = await serve_relay(settings, backend, HealthBoard())
    try:
        yield address, secret
    finally:
        await server.stop(None)


async def test_the_real_relay_is_closed_to_strangers() -> None:
    async with real_relay() as (address, secret), grpc.aio.insecure_channel(address) as channel:
        stub: Any = rpc.TextGenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Info(pb.InfoRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as starting:
            await stub.Info(pb.InfoRequest(), metadata=((SECRET_KEY, secret),))
        assert starting.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_real_relay_reads_no_message_of_a_stranger() -> None:
    """Whose message never comes: the refusal does not wait for it."""
    async with real_relay() as (address, _), grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_unary("/generate.v3.TextGenerationService/Prefill")(timeout=20)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_real_relay_takes_no_more_than_the_port() -> None:
    async with real_relay() as (address, secret), grpc.aio.insecure_channel(address) as channel:
        health: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        metadata = ((SECRET_KEY, secret),)
        assert await health(b"", metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health(b"x" * (1024 * 1024 + 1), metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_real_relay_has_few_connections() -> None:
    async with real_relay() as (address, _):
        name = "\0" + address.removeprefix("unix-abstract:")
        opened = []
        for _ in range(5):
            opened.append(socket.socket(socket.AF_UNIX))
            opened[-1].connect(name)
            opened[-1].settimeout(20)
        # Two front ends have four; the server speaks first, or hangs up.
        loop = asyncio.get_running_loop()
        said = [await loop.run_in_executor(None, each.recv, 1) for each in opened]
        assert said.count(b"") == 1
        for each in opened:
            each.close()


async def test_a_client_that_claims_a_secret_is_relayed_without_it() -> None:
    async with two_front_ends() as both:
        assert await both.once(b"abc", metadata=((SECRET_KEY, "a guess"),)) == b"cba"
