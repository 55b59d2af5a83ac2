"""Stopping and losing parts: what clients, probes and the operating system see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.public_api import collect, generate, text_request, until_refused
from support.pods.harness import NOT_SERVING, SERVING, ServerProcess, free_port, serve
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import TokenizeRequest
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

PROMPT = "import os\n"
LONG = {"max_new_tokens": 1900, "ignore_eos": True}


class Reader:
    """Reads a stream on a thread of its own; what came, and how it ended."""

    def __init__(self, stub: Any, request: Any) -> None:
        self.events: list[Any] = []
        self.error: grpc.RpcError | None = None
        self._begun = threading.Event()
        self._call = stub.Generate(request, timeout=120)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._begun.wait(60)

    def _read(self) -> None:
        try:
            for event in self._call:
                self.events.append(event)
                self._begun.set()
        except grpc.RpcError as error:
            self.error = error
        self._begun.set()

    def wait(self) -> None:
        self._thread.join(90)
        assert not self._thread.is_alive()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def gone(pid: int) -> bool:
    """Whether a process has ended (one that nobody has reaped yet has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def connection(server: ServerProcess) -> Any:
    """A stub with a connection of its own, which may reach any front end."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    server.channels.append(grpc.insecure_channel(server.address, options=options))
    return GenerationServiceStub(server.channels[-1])


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def batch() -> pb.Batch:
    request = pb.Request(
        id=1,
        inputs=PROMPT,
        truncate=100,
        parameters=pb.NextTokenChooserParameters(temperature=1.0, repetition_penalty=1.0),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=9),
    )
    request.input_chunks.chunks.add(text=PROMPT)
    return pb.Batch(id=1, requests=[request], size=1, max_tokens=100)


def test_a_lame_duck_still_serves_and_says_not_ready() -> None:
    with serve("--lame-duck-seconds", "3") as server:
        stub = server.stub()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.health() == NOT_SERVING)
        assert server.health("liveness") == SERVING
        request = text_request(PROMPT, stopping={"max_new_tokens": 3})
        assert len(generate(stub, request).samples[0].token_ids) == 3
        assert server.stop() == 0


def test_a_drain_refuses_new_calls_and_finishes_old_ones() -> None:
    with serve() as server:
        stub = server.stub()
        running = Reader(stub, text_request(PROMPT, stopping={**LONG, "max_new_tokens": 400}))
        # Wrappers deliver one signal twice within a moment, which cuts nothing off.
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.health() == NOT_SERVING)
        refused = until_refused(stub, text_request(PROMPT, stopping={"max_new_tokens": 1}))
        running.wait()
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        assert "grpc-retry-pushback-ms" in dict(refused.trailing_metadata())
        assert running.error is None
        assert len(collect(running.events, 1).samples[0].token_ids) == 400
        assert server.process.wait(60) == 0


def test_ctrl_c_waits_for_what_runs_and_for_nothing_else() -> None:
    with serve("--lame-duck-seconds", "600") as server:
        stub = server.stub()
        running = Reader(stub, text_request(PROMPT, stopping={**LONG, "max_new_tokens": 200}))
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.health() == NOT_SERVING)
        running.wait()
        assert running.error is None
        assert len(collect(running.events, 1).samples[0].token_ids) == 200
        assert server.process.wait(120) == 0


async def test_no_client_that_calls_all_the_time_is_cancelled_by_a_stop() -> None:
    ended: Counter[tuple[grpc.StatusCode, bool]] = Counter()
    answered: Counter[int] = Counter()

    async def client(number: int, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            stub = GenerationServiceStub(channel)
            try:
                while True:
                    await stub.Tokenize(TokenizeRequest(text=PROMPT), timeout=60)
                    answered[number] += 1
                    await asyncio.sleep(0.05)
            except grpc.aio.AioRpcError as error:
                hint = "grpc-retry-pushback-ms" in dict(error.trailing_metadata() or ())
                ended[error.code(), hint] += 1

    with serve() as server:
        clients = [asyncio.create_task(client(number, server.address)) for number in range(30)]
        await asyncio.to_thread(wait_for, lambda: len(answered) == 30)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*clients)
        assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert ended == {(grpc.StatusCode.UNAVAILABLE, True): 30}


async def test_nor_by_a_stop_while_a_group_forms() -> None:
    ended: Counter[grpc.StatusCode] = Counter()

    async def client(server: ServerProcess) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(server.address, options) as channel:
            stub = GenerationServiceStub(channel)
            while server.process.poll() is None:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Tokenize(TokenizeRequest(text=PROMPT), timeout=60)
                ended[refused.value.code()] += 1
                await asyncio.sleep(0.01)

    ports = ["--master-port", str(free_port()), "--shard-port", str(free_port())]
    alone = ["--num-nodes", "2", "--master-addr", "127.0.0.1", *ports]
    with serve(*alone, wait=False) as server:
        await asyncio.to_thread(wait_for, lambda: listens(server.port))
        clients = [asyncio.create_task(client(server)) for _ in range(30)]
        await asyncio.to_thread(wait_for, lambda: ended.total() > 30)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*clients)
        assert await asyncio.to_thread(server.process.wait, 30) == 0
    assert set(ended) == {grpc.StatusCode.UNAVAILABLE}


def test_what_outlasts_the_grace_ends_with_unavailable() -> None:
    with serve("--graceful-termination-timeout", "0.5") as server:
        running = Reader(server.stub(), text_request(PROMPT, stopping=LONG))
        server.process.send_signal(signal.SIGTERM)
        running.wait()
        assert running.error is not None
        assert running.error.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(60) == 0
        assert "stopped cut_off=1 cut_off_batches=0" in server.log.read_text()


def test_who_reads_that_it_has_stopped_finds_the_ports_closed_and_the_processes_gone() -> None:
    with serve("--front-ends", "2") as server:
        children = server.children()
        # As if it were in the middle of a step that takes seconds.
        os.kill(server.engine_pid(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: "tokenpod: stopped" in server.log.read_text())
        assert not listens(server.port)
        assert not listens(server.health_port)
        assert all(gone(pid) for pid in children)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("front_ends", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_a_second_signal_a_second_later_ends_all_at_once_whatever_hangs(front_ends: str) -> None:
    with serve("--lame-duck-seconds", "600", "--front-ends", front_ends) as server:
        children = server.children()
        streams = [
            Reader(connection(server), text_request(PROMPT, stopping=LONG)) for _ in range(6)
        ]
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        shard = server.shard().Prefill.future(pb.PrefillRequest(batch=batch()), timeout=60)
        socket_shard = rpc.TextGenerationServiceStub(server.channel(f"unix:{server.uds}"))
        other = socket_shard.Prefill.future(pb.PrefillRequest(batch=batch()), timeout=60)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.health() == NOT_SERVING)
        time.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(4) == 0
        for stream in streams:
            stream.wait()
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.UNAVAILABLE
        for call in (shard, other):
            assert (call.code(), call.details()) == (
                grpc.StatusCode.UNAVAILABLE,
                "the server is draining",
            )
        wait_for(lambda: all(gone(pid) for pid in children))
        assert not Path(server.uds).exists()


def test_a_killed_engine_fails_its_calls_and_ends_the_server() -> None:
    with serve() as server:
        running = Reader(server.stub(), text_request(PROMPT, stopping=LONG))
        os.kill(server.engine_pid(), signal.SIGKILL)
        running.wait()
        assert running.error is not None
        assert running.error.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(60) == 1
        assert 'reason="the engine was killed by SIGKILL, out of memory?"' in server.log.read_text()
        assert not Path(server.uds).exists()


def test_a_stopped_engine_is_seen_and_a_resumed_one_forgiven(server: ServerProcess) -> None:
    engine = server.engine_pid()
    running = Reader(server.stub(), text_request(PROMPT, stopping={**LONG, "max_new_tokens": 100}))
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_for(lambda: server.health() == NOT_SERVING)
        assert server.health("liveness") == SERVING
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_for(lambda: server.health() == SERVING)
    running.wait()
    assert running.error is None


def test_probes_are_answered_by_name_on_both_ports(server: ServerProcess) -> None:
    names = ("", "readiness", "liveness", "startup", "generate.v3.TextGenerationService")
    for name in names[:4]:
        assert server.health(name) == SERVING
    with grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in names:
            request = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(request, timeout=10).status == SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
