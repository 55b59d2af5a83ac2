"""Bursts, floods and idle connections: who behaves loses no call, and probes get through."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from support.clients import floods
from support.examples import ALL
from support.pods.costs import forget_peak, peak_bytes
from support.pods.harness import SERVING, ServerProcess, serve
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GetModelRequest
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

MEGABYTE = 1024 * 1024


@pytest.fixture(scope="module")
def flooded() -> Iterator[ServerProcess]:
    """A server of its own."""
    with serve() as running:
        yield running
        assert running.stop() == 0


# -- bursts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("connections", "calls"), [pytest.param(1, 1500, marks=pytest.mark.slow), (8, 60)]
)
def test_a_burst_is_served_or_refused_with_a_hint_and_never_reset(
    flooded: ServerProcess, connections: int, calls: int
) -> None:
    ends = asyncio.run(floods.burst(flooded.address, connections, calls))
    assert sum(ends.values()) == connections * calls
    refused = ("RESOURCE_EXHAUSTED", True), ("UNAVAILABLE", True)
    assert not set(ends) - {("OK", False), *refused}, ends


# -- floods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", floods.ONGOING)
def test_a_connection_that_floods_costs_others_no_call(flooded: ServerProcess, kind: str) -> None:
    # Opened and reset calls cost most, and each round of the others is slow beside them.
    rounds = 50 if ALL else 6 if kind == floods.RESETS else 25
    over, pid = threading.Event(), flooded.process.pid
    forget_peak(pid)
    before = peak_bytes(pid)
    sent: list[int] = []
    flooding = threading.Thread(
        target=lambda: sent.append(floods.flood(flooded.port, floods.ONGOING[kind](), over))
    )
    flooding.start()
    try:
        with grpc.insecure_channel(flooded.address) as channel:
            stub = GenerationServiceStub(channel)
            for _ in range(rounds):
                assert stub.GetModel(GetModelRequest(), timeout=30).model.name
                assert flooded.health() == SERVING
    finally:
        over.set()
        flooding.join()
    assert sent[0] > MEGABYTE, "there was a flood"
    assert peak_bytes(pid) - before < 700 * MEGABYTE


@pytest.mark.parametrize("connections", [1, 8])
def test_calls_that_send_no_message_cost_others_no_call(
    flooded: ServerProcess, connections: int
) -> None:
    request = pb.GenerateRequest(text="x", stopping={"max_new_tokens": 1})
    with contextlib.ExitStack() as stack, grpc.insecure_channel(flooded.address) as channel:
        silent = [stack.enter_context(floods.opened(flooded.port)) for _ in range(connections)]
        for connection in silent:
            connection.sendall(next(floods.silent_calls(256)))
        generate = GenerationServiceStub(channel).Generate
        for _ in range(50):
            assert list(generate(request, timeout=30))
            assert flooded.health() == SERVING


def test_a_connection_that_pings_too_often_is_closed(flooded: ServerProcess) -> None:
    with floods.opened(flooded.port) as connection:
        for _ in range(20):
            with contextlib.suppress(OSError):
                connection.sendall(floods.frame(floods.PING, 0, 0, b"12345678"))
            if floods.closed_within(connection, 0.1):
                break
        assert floods.closed_within(connection, 20)


def test_a_connection_with_empty_continuations_is_closed(flooded: ServerProcess) -> None:
    frames = floods.continuations(b"")
    with floods.opened(flooded.port) as connection:
        with contextlib.suppress(OSError):
            for _ in range(100):
                connection.sendall(next(frames))
        assert floods.closed_within(connection, 20)


# -- connections -------------------------------------------------------------------------------


def test_idle_connections_do_not_silence_the_health_port() -> None:
    with serve("--max-connections", "60") as server, contextlib.ExitStack() as stack:
        assert "max_connections=60" in server.log.read_text()
        # As many descriptors as it has, and some more.
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (200, 200))
        for _ in range(300):
            idle = socket.create_connection(("127.0.0.1", server.port), timeout=20)
            stack.enter_context(idle)
        assert server.health() == SERVING


def test_a_connection_too_many_is_closed_and_others_go_on() -> None:
    with serve("--max-connections", "3") as server, contextlib.ExitStack() as stack:
        kept = [stack.enter_context(floods.opened(server.port)) for _ in range(3)]
        assert kept[-1].recv(1), "the server speaks HTTP/2"
        assert floods.closed_within(stack.enter_context(floods.opened(server.port)), 20)
        kept.pop().close()
        with grpc.insecure_channel(server.address) as channel:
            stub = GenerationServiceStub(channel)
            assert stub.GetModel(GetModelRequest(), timeout=30, wait_for_ready=True).model.name


def test_a_connection_that_says_nothing_is_closed(flooded: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", flooded.port), timeout=20) as silent:
        assert floods.closed_within(silent, 30)


def test_a_connection_without_calls_is_closed_in_the_end() -> None:
    with serve("--max-connection-idle-seconds", "1") as server, floods.opened(server.port) as idle:
        idle.sendall(floods.frame(floods.SETTINGS, floods.ACK, 0))
        assert floods.closed_within(idle, 60)


@pytest.mark.slow
def test_a_connection_that_answers_no_ping_is_closed() -> None:
    """Its other end is gone, and the network says nothing."""
    with serve("--keepalive-seconds", "10") as server, floods.opened(server.port) as half_open:
        half_open.sendall(floods.frame(floods.SETTINGS, floods.ACK, 0))
        assert floods.closed_within(half_open, 90)
