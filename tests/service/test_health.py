"""What probes are told, on the main port and on the one for kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.clients import floods
from support.clients.rpcs import serving
from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.rpc.health import HealthBoard, Listening, serve_health
from tokenpod.service.rpc.listen import StartError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "generate.v3.TextGenerationService"
READY = ["", "readiness", SERVICE]
SECOND = 1_000_000_000


@dataclass
class Pulse:
    """An engine whose last step is as old as a test says."""

    pending: bool
    last_step_at: int
    heard_at: int
    usual_step: float
    #: How often it was asked for a sign.
    asked: int = 0

    def ask(self) -> None:
        self.asked += 1


def pulse(
    *, pending: bool = True, age: float = 0.0, silent: float | None = None, usual_step: float = 0.01
) -> Pulse:
    """`age`: seconds since the last step; `silent`: since any message."""
    now = time.monotonic_ns()
    # The clock may have begun, with the machine, less than that ago.
    ago = [max(now - int(each * SECOND), 1) for each in (age, age if silent is None else silent)]
    return Pulse(pending, *ago, usual_step)


@dataclass
class Probe:
    """A board, and a client that asks for it."""

    board: HealthBoard
    stub: Any

    async def check(self, service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await self.stub.Check(request, timeout=5)).status)

    async def ready(self) -> bool:
        """One answer under every name that asks for readiness."""
        answers = {await self.check(name) for name in READY}
        assert len(answers) == 1
        return answers == {SERVING}

    async def wait(self, service: str, status: int) -> None:
        async with asyncio.timeout(10):
            watch = self.stub.Watch(health_pb2.HealthCheckRequest(service=service))
            while (await watch.read()).status != status:
                continue
            watch.cancel()

    @contextlib.contextmanager
    def watching(self, engine: Pulse) -> Iterator[None]:
        self.board.watch(engine)
        try:
            yield
        finally:
            self.board.close()


@pytest.fixture
async def probe() -> AsyncIterator[Probe]:
    board = HealthBoard()

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, [SERVICE])

    async with serving(prepare=prepare) as running:
        yield Probe(board, health_pb2_grpc.HealthStub(running.channel))


async def several_polls() -> None:
    await asyncio.sleep(0.6)


async def test_a_starting_server_lives_but_is_not_ready(probe: Probe) -> None:
    assert not await probe.ready()
    assert not probe.board.is_serving()
    assert await probe.check("startup") == NOT_SERVING
    assert await probe.check("liveness") == SERVING


async def test_a_serving_server_is_ready_under_every_name(probe: Probe) -> None:
    await probe.board.set_serving(True)
    assert await probe.ready()
    assert probe.board.is_serving()
    assert await probe.check("startup") == SERVING


async def test_a_lost_engine_makes_it_unready_but_not_unstarted(probe: Probe) -> None:
    await probe.board.set_serving(True)
    await probe.board.set_serving(False)
    assert not await probe.ready()
    assert not probe.board.is_serving()
    assert await probe.check("startup") == SERVING


async def test_a_draining_server_is_not_ready_but_lives(probe: Probe) -> None:
    await probe.board.set_serving(True)
    await probe.board.drain()
    assert not await probe.ready()
    assert await probe.check("liveness") == SERVING
    assert probe.board.is_serving(), "streams go on"
    await probe.board.set_serving(True)
    assert not await probe.ready(), "a drain is for good"


async def test_an_unknown_service_is_not_found(probe: Probe) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await probe.check("no.such.Service")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_every_change(probe: Probe) -> None:
    watch = probe.stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == NOT_SERVING
    await probe.board.set_serving(True)
    assert (await watch.read()).status == SERVING
    await probe.board.drain()
    assert (await watch.read()).status == NOT_SERVING
    watch.cancel()


async def test_work_without_a_step_makes_it_unready_until_the_next_step(probe: Probe) -> None:
    await probe.board.set_serving(True)
    engine = pulse(age=6.0)
    with probe.watching(engine):
        await probe.wait("readiness", NOT_SERVING)
        assert not await probe.ready()
        assert not probe.board.is_serving()
        assert await probe.check("liveness") == SERVING
        engine.last_step_at = time.monotonic_ns()
        await probe.wait("readiness", SERVING)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(lambda: pulse(pending=False, age=600.0), id="idle for long"),
        pytest.param(lambda: pulse(age=1.0), id="a second since the last step"),
        pytest.param(lambda: pulse(age=15.0, usual_step=1.0), id="slow steps are usual"),
    ],
)
async def test_what_is_not_stuck_stays_ready(probe: Probe, engine: Any) -> None:
    await probe.board.set_serving(True)
    with probe.watching(engine()):
        await several_polls()
        assert await probe.ready()


async def test_work_that_comes_after_a_long_idle_time_is_not_stuck(probe: Probe) -> None:
    await probe.board.set_serving(True)
    engine = pulse(pending=False, age=600.0)
    with probe.watching(engine):
        await several_polls()
        engine.pending = True
        await several_polls()
        assert await probe.ready()


async def test_work_that_was_given_up_stays_pending_until_the_engine_is_heard_of(
    probe: Probe,
) -> None:
    await probe.board.set_serving(True)
    engine = pulse(age=6.0)
    with probe.watching(engine):
        await probe.wait("readiness", NOT_SERVING)
        engine.pending = False
        await several_polls()
        assert engine.asked
        assert not await probe.ready()
        engine.heard_at = time.monotonic_ns()
        await probe.wait("readiness", SERVING)


async def test_who_takes_new_calls_hears_of_a_stall_and_of_its_end() -> None:
    counters = PodCounters.create(1)
    board, engine = HealthBoard(counters=counters), pulse(age=6.0)
    board.watch(engine)
    assert not counters.stalled
    await several_polls()
    assert counters.stalled
    engine.last_step_at = time.monotonic_ns()
    await several_polls()
    board.close()
    assert not counters.stalled


async def test_slow_steps_are_given_twenty_of_their_kind(probe: Probe) -> None:
    await probe.board.set_serving(True)
    with probe.watching(pulse(age=25.0, usual_step=1.0)):
        await probe.wait("readiness", NOT_SERVING)


async def test_an_engine_that_never_moves_again_is_restarted_and_one_that_does_is_not(
    probe: Probe,
) -> None:
    await probe.board.set_serving(True)
    engine = pulse(age=70.0)
    with probe.watching(engine):
        await probe.wait("liveness", NOT_SERVING)
        engine.last_step_at = engine.heard_at = time.monotonic_ns()
        await probe.wait("liveness", SERVING)


async def test_time_in_which_this_process_did_not_run_is_not_the_engines_silence() -> None:
    board, engine = HealthBoard(stall_timeout=3.0), pulse()
    board.watch(engine)
    await several_polls()
    engine.last_step_at = engine.heard_at = time.monotonic_ns()
    # The loop is held: what the engine says meanwhile is not read.
    time.sleep(6.0)  # noqa: ASYNC251
    await asyncio.sleep(0.3)
    assert not board.stuck.done()
    board.close()


async def test_an_engine_that_has_nobody_to_step_is_not_restarted(probe: Probe) -> None:
    await probe.board.set_serving(True)
    with probe.watching(pulse(age=70.0, silent=1.0)):
        await probe.wait("readiness", NOT_SERVING)
        assert await probe.check("liveness") == SERVING


async def test_an_engine_that_never_moves_again_is_known_as_stuck_until_another_is_watched(
    probe: Probe,
) -> None:
    with probe.watching(pulse(age=70.0)):
        async with asyncio.timeout(10):
            await probe.board.stuck
        await probe.wait("liveness", NOT_SERVING)
    with probe.watching(pulse()):
        await probe.wait("liveness", SERVING)
        assert not probe.board.stuck.done()


async def test_a_pod_that_follows_has_started_before_its_group_serves_and_is_ready_with_it() -> (
    None
):
    board = HealthBoard(follows=True)

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, [SERVICE])

    async with serving(prepare=prepare) as running:
        probe = Probe(board, health_pb2_grpc.HealthStub(running.channel))
        told = {name: await probe.check(name) for name in ("startup", "readiness", "", SERVICE)}
        assert told == {
            "startup": SERVING,
            "readiness": NOT_SERVING,
            "": NOT_SERVING,
            SERVICE: NOT_SERVING,
        }
        await board.set_serving(True)
        assert await probe.ready()
        await board.drain()
        assert not await probe.ready()


async def test_the_health_port_tells_the_same_board(probe: Probe) -> None:
    server, port = await serve_health("127.0.0.1:0", probe.board)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            kubelet = Probe(probe.board, health_pb2_grpc.HealthStub(channel))
            assert await kubelet.check("startup") == NOT_SERVING
            await probe.board.set_serving(True)
            for name in (*READY, "startup", "liveness"):
                assert await kubelet.check(name) == await probe.check(name) == SERVING
            await probe.board.drain()
            assert not await kubelet.ready()
            assert await kubelet.check("liveness") == SERVING
    finally:
        await server.stop(None)


async def test_a_taken_health_port_is_refused(probe: Probe) -> None:
    server, port = await serve_health("127.0.0.1:0", probe.board)
    try:
        with pytest.raises(StartError, match="the address is in use"):
            await serve_health(f"127.0.0.1:{port}", HealthBoard())
    finally:
        await server.stop(None)


async def test_list_names_every_service_with_its_status(probe: Probe) -> None:
    await probe.board.set_serving(True)
    listed = await probe.stub.List(health_pb2.HealthListRequest(), timeout=5)
    statuses = {name: answer.status for name, answer in listed.statuses.items()}
    assert statuses == dict.fromkeys([*READY, "startup", "liveness"], SERVING)
    await probe.board.drain()
    listed = await probe.stub.List(health_pb2.HealthListRequest(), timeout=5)
    assert listed.statuses["readiness"].status == NOT_SERVING
    assert listed.statuses["liveness"].status == SERVING


@contextlib.asynccontextmanager
async def connections(address: str, count: int) -> AsyncIterator[list[Any]]:
    """Stubs, each with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with contextlib.AsyncExitStack() as stack:
        yield [
            health_pb2_grpc.HealthStub(
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            )
            for _ in range(count)
        ]


async def watched(stubs: list[Any]) -> list[Any]:
    """Streams that have had a first status, one for each stub."""
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service="liveness")) for stub in stubs]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    return watches


async def test_watch_streams_are_limited_and_their_places_given_back() -> None:
    server, port = await serve_health("127.0.0.1:0", HealthBoard(most_watchers=2))
    try:
        async with connections(f"127.0.0.1:{port}", 3) as (*stubs, other):
            watches = await watched(stubs)
            with pytest.raises(grpc.aio.AioRpcError, match="at most 2") as refused:
                await watched([other])
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            watches[0].cancel()
            async with asyncio.timeout(10):
                while True:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await watched([other])
                        break
            request = health_pb2.HealthCheckRequest(service="liveness")
            assert (await other.Check(request)).status == SERVING
    finally:
        await server.stop(None)


async def test_watch_streams_of_one_server_leave_those_of_another_their_places() -> None:
    board = HealthBoard(most_watchers=2)

    async def prepare(server: grpc.aio.Server) -> None:
        await board.add_to(server, [SERVICE])

    server, port = await serve_health("127.0.0.1:0", board)
    try:
        async with (
            serving(prepare=prepare) as public,
            connections(public.address, 2) as stubs,
            connections(f"127.0.0.1:{port}", 1) as (probe,),
        ):
            await watched(stubs)
            await watched([probe])
    finally:
        await server.stop(None)


async def test_a_connection_can_hold_an_eighth_of_the_watch_streams() -> None:
    server, port = await serve_health("127.0.0.1:0", HealthBoard(most_watchers=16))
    try:
        async with connections(f"127.0.0.1:{port}", 2) as (greedy, other):
            await watched([greedy, greedy])
            with pytest.raises(grpc.aio.AioRpcError, match="2 of them of this connection"):
                await watched([greedy])
            await watched([other])
    finally:
        await server.stop(None)


async def test_a_watcher_that_reads_nothing_stops_no_status() -> None:
    board = HealthBoard()
    server, port = await serve_health("127.0.0.1:0", board)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        # With a window of 0 bytes no message can be sent on a stream.
        window = struct.pack(">HI", 4, 0)
        call = floods.call_headers("/grpc.health.v1.Health/Watch")
        writer.write(floods.PREFACE + floods.frame(floods.SETTINGS, 0, 0, window))
        writer.write(floods.frame(floods.HEADERS, floods.END_HEADERS, 1, call))
        writer.write(floods.frame(floods.DATA, floods.END_STREAM, 1, bytes(5)))
        await writer.drain()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert (await watch.read()).status == NOT_SERVING
            await asyncio.wait_for(board.set_serving(True), 20)
            assert (await watch.read()).status == SERVING
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
    finally:
        writer.close()
        await server.stop(None)


@dataclass
class HealthPort:
    """A health port, by a channel."""

    channel: grpc.aio.Channel

    async def code(self, method: str, data: bytes) -> grpc.StatusCode:
        call: Any = self.channel.unary_unary(f"/grpc.health.v1.Health/{method}")
        try:
            await call(data, timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
async def health_port() -> AsyncIterator[HealthPort]:
    server, port = await serve_health("127.0.0.1:0", HealthBoard())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield HealthPort(channel)
    await server.stop(None)


@pytest.mark.parametrize("data", [b"\x0a", b"\xff" * 50, b"\x0a\x01\xff"])
async def test_what_is_no_message_is_an_invalid_argument(
    health_port: HealthPort, data: bytes
) -> None:
    assert await health_port.code("Check", data) is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_health_port_takes_four_kilobytes(health_port: HealthPort) -> None:
    fits = b"\xfa\x7f" + b"\x80\x1f" + b"x" * 3968
    assert await health_port.code("Check", fits) is grpc.StatusCode.OK
    assert await health_port.code("Check", fits * 2) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_health_port_describes_health_and_nothing_else(health_port: HealthPort) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(health_port.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    listed, health, other = [
        answer async for answer in stub.ServerReflectionInfo(iter(asked), timeout=10)
    ]
    names = {each.name for each in listed.list_services_response.service}
    reflection = {f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha")}
    assert names == {"grpc.health.v1.Health", *reflection}
    assert health.file_descriptor_response.file_descriptor_proto
    assert other.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# -- time in which the watcher did not run


def ticked(*at: float) -> Listening:
    """A listener that ticks every second, at these times."""
    listening = Listening(1.0, 0)
    for each in at:
        listening.tick(int(each * SECOND))
    return listening


def test_a_listener_that_runs_on_schedule_has_listened_all_the_time() -> None:
    listening = ticked(1, 2, 3.5, 5, 6)
    assert listening.seconds(since=0) == 6
    assert listening.seconds(since=int(4.5 * SECOND)) == 1.5


def test_time_beyond_two_periods_is_lost() -> None:
    listening = ticked(1, 2, 45)
    assert listening.seconds(since=0) == 4
    # What is stamped within that time has been read behind it.
    assert listening.seconds(since=10 * SECOND) == 0
    listening.tick(46 * SECOND)
    assert listening.seconds(since=10 * SECOND) == 1
    assert listening.seconds(since=3 * SECOND) == 2


def test_what_nobody_asks_for_any_more_is_forgotten() -> None:
    listening = ticked(1, 10, 11, 20)
    listening.forget(before=11 * SECOND)
    assert listening.seconds(since=11 * SECOND) == 2
    assert len(listening._lost) == 1
