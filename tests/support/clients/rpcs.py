"""Small real servers: handlers of every kind behind the interceptors under test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

SERVICE = "test.Arities"
#: Every arity, and both ways to write a handler that streams its answers.
KINDS = [
    "unary_unary",
    "stream_unary",
    "unary_stream_generator",
    "unary_stream_writer",
    "stream_stream_generator",
    "stream_stream_writer",
]

Act = Callable[[Any], Awaitable[None]]


async def nothing(context: Any) -> None:
    """An act that succeeds."""


@dataclass
class Scripted(rpc.TextGenerationServiceServicer):
    """Our own service: `act` decides what becomes of Info, and of Generate after one event."""

    act: Act = nothing
    #: Set when a handler's `finally` has run.
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def Info(self, request: Any, context: Any) -> Any:
        await self.act(context)
        return pb.InfoResponse(dtype="float32")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield pb.GenerateResponse(started=pb.Started(prompt_tokens=1))
            await self.act(context)
            yield pb.GenerateResponse(tokens=pb.TokenDelta(text="x"))
        finally:
            self.ended.set()


def arities(act: Act) -> grpc.GenericRpcHandler:
    """A handler of each kind: it acts, then answers with b"done" (a stream: b"first" before)."""

    async def unary(request: Any, context: Any) -> bytes:
        await act(context)
        return b"done"

    async def generator(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await act(context)
        yield b"done"

    async def writer(request: Any, context: Any) -> None:
        await context.write(b"first")
        await act(context)
        await context.write(b"done")

    handlers = {
        "unary_unary": grpc.unary_unary_rpc_method_handler(unary),
        "stream_unary": grpc.stream_unary_rpc_method_handler(unary),
        "unary_stream_generator": grpc.unary_stream_rpc_method_handler(generator),
        "unary_stream_writer": grpc.unary_stream_rpc_method_handler(writer),
        "stream_stream_generator": grpc.stream_stream_rpc_method_handler(generator),
        "stream_stream_writer": grpc.stream_stream_rpc_method_handler(writer),
    }
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


async def call_kind(channel: grpc.aio.Channel, kind: str, **call: Any) -> list[bytes]:
    """What a handler of `kind` answers."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"request"

    path = f"/{SERVICE}/{kind}"
    request = requests() if kind.startswith("stream") else b"request"
    if kind.endswith("unary"):
        return [await getattr(channel, kind)(path)(request, **call)]
    make = getattr(channel, "_".join(kind.split("_")[:2]))
    return [message async for message in make(path)(request, **call)]


async def outlast(
    call: Callable[[float], Awaitable[Any]], begun: asyncio.Event
) -> grpc.aio.AioRpcError:
    """How a call ends whose deadline passes while its handler, which sets `begun`, runs on.

    A short deadline may pass before the call is there on a busy machine: a longer one follows.
    """
    for seconds in (0.2, 2.0, 20.0):
        try:
            await call(seconds)
        except grpc.aio.AioRpcError as error:
            if begun.is_set():
                return error
    raise AssertionError("no call was seen by its handler and outlasted there")


@dataclass(frozen=True)
class Running:
    """A started server, and a channel to it."""

    server: grpc.aio.Server
    address: str
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return rpc.TextGenerationServiceStub(self.channel)


@contextlib.asynccontextmanager
async def serving(
    *,
    servicer: Scripted | None = None,
    handlers: Sequence[grpc.GenericRpcHandler] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    address: str = "127.0.0.1:0",
    prepare: Callable[[grpc.aio.Server], Awaitable[None]] | None = None,
) -> AsyncIterator[Running]:
    """A server on loopback, or at `address`, until the block ends."""
    before = asyncio.all_tasks()
    server = grpc.aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
    if servicer is not None:
        rpc.add_TextGenerationServiceServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers(tuple(handlers))
    if prepare is not None:
        await prepare(server)
    port = server.add_insecure_port(address)
    await server.start()
    target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            yield Running(server, target, channel)
    finally:
        await server.stop(None)
        # It does not wait for the handlers of calls that were cancelled to record their end.
        if late := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(late, timeout=10)
