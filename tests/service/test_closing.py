"""The end of a server that clients still call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.rpcs import Act, Running, arities, call_kind, nothing, serving
from support.waiting import until
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import Closing, Handler


@dataclass
class Pause:
    """The sleep before the stop, as long as a test likes."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, seconds: float) -> None:
        assert seconds > 1.0, "refused clients come again after a second"
        self.begun.set()
        await self.over.wait()


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Counting(Closing):
    """A test can wait for calls to come."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._come = asyncio.Semaphore(0)

    def wrap(self, handler: Handler, details: grpc.HandlerCallDetails) -> Handler:
        self._come.release()
        return super().wrap(handler, details)

    async def called(self, times: int = 1) -> None:
        """So many more calls have come, and what is done about them at once is done."""
        for _ in range(times):
            await asyncio.wait_for(self._come.acquire(), 60)
        await asyncio.sleep(0.1)

    @property
    def waiting(self) -> int:
        """Calls that are kept."""
        return self._kept


@dataclass
class Ending:
    """A server that stops once `pause` is over, after it has been called."""

    closing: Counting
    running: Running
    pause: Pause
    stop: asyncio.Task[None]

    async def kept(self, kind: str = "unary_unary") -> asyncio.Task[Any]:
        """A call that comes now, and is not answered yet."""
        call = asyncio.create_task(call_kind(self.running.channel, kind))
        await self.closing.called()
        assert not call.done()
        return call

    async def end(self) -> None:
        self.pause.over.set()
        await self.stop


@asynccontextmanager
async def ending(most: int = 100, act: Act = nothing) -> AsyncIterator[Ending]:
    closing, pause = Counting(most), Pause()
    async with serving(handlers=[arities(act)], interceptors=[closing]) as running:
        call = asyncio.create_task(call_kind(running.channel, "unary_unary"))
        await closing.called()
        stop = asyncio.create_task(closing.stop(running.server, 5.0, pause))
        await pause.begun.wait()
        yield Ending(closing, running, pause, stop)
        assert await call == [b"done"]


async def refused(call: asyncio.Task[Any]) -> None:
    """It ended with UNAVAILABLE and a hint when to come again."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(ended.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream_writer", "stream_stream_generator"])
async def test_who_calls_last_waits_for_the_stop_and_is_refused_with_a_hint(kind: str) -> None:
    async with ending() as server:
        call = await server.kept(kind)
        await server.end()
        await refused(call)


async def test_what_runs_goes_on_to_its_end() -> None:
    finish = asyncio.Event()

    async def act(context: Any) -> None:
        await finish.wait()

    async with ending(act=act) as server:
        server.pause.over.set()
        await asyncio.sleep(0.1)
        assert not server.stop.done()
        finish.set()
        await server.stop


async def test_no_client_that_comes_again_and_again_is_cancelled() -> None:
    async with ending() as server:

        async def client() -> tuple[grpc.StatusCode, bool]:
            """How its first call that fails ends, and whether with a hint; its second one."""
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(server.running.address, options) as channel:
                codes = []
                for _ in range(2):
                    with pytest.raises(grpc.aio.AioRpcError) as ended:
                        await call_kind(channel, "unary_unary")
                    hint = "grpc-retry-pushback-ms" in dict(ended.value.trailing_metadata() or ())
                    codes.append((ended.value.code(), hint))
                assert codes[1] == (grpc.StatusCode.UNAVAILABLE, False), "the port is closed"
                return codes[0]

        clients = [asyncio.create_task(client()) for _ in range(30)]
        await server.closing.called(len(clients))
        await server.end()
        seen = set(await asyncio.gather(*clients))
    assert seen == {(grpc.StatusCode.UNAVAILABLE, True)}


async def test_only_so_many_are_kept_and_the_others_are_refused_at_once() -> None:
    async with ending(most=2) as server:
        kept = [await server.kept(), await server.kept()]
        third = asyncio.create_task(call_kind(server.running.channel, "unary_unary"))
        await server.closing.called()
        await refused(third)
        kept[0].cancel()
        await until(lambda: server.closing.waiting == 1)
        kept[0] = await server.kept()
        await server.end()
        for call in kept:
            await refused(call)


async def test_probes_do_not_wait() -> None:
    closing, pause, board = Closing(9, TABLE.open), Pause(), HealthBoard(follows=False)

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, ())

    async with serving(
        handlers=[arities(nothing)], interceptors=[closing], prepare=prepare
    ) as running:
        await call_kind(running.channel, "unary_unary")
        stop = asyncio.create_task(closing.stop(running.server, 5.0, pause))
        await pause.begun.wait()
        health = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="liveness")
        assert (await health.Check(request, timeout=10)).status
        pause.over.set()
        await stop


async def test_without_calls_of_late_nobody_is_waited_for() -> None:
    clock, pause = Clock(), Pause()
    closing = Closing(9, now=clock)
    async with serving(handlers=[arities(nothing)], interceptors=[closing]) as running:
        await call_kind(running.channel, "unary_unary")
        clock.seconds += 1.3
        await closing.stop(running.server, 5.0, pause)
    assert not pause.begun.is_set()
