"""A copy that has lost a rank sends its clients away, and cancels no call of theirs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.public_api import generate, text_request
from support.pods.faults import engines, kill
from support.pods.groups import ENV, FLAGS
from support.pods.harness import NOT_SERVING, SERVING, ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

SHORT = text_request("import os\n", stopping={"max_new_tokens": 2, "ignore_eos": True})
#: Connections of their own, which look again soon.
OWN = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 200),
]
RETRYING = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
AGAIN_SECONDS = 90.0
CLOSING = "closing connections"


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    flags = (*FLAGS, "--num-shard", "2", "--lame-duck-seconds", "1")
    with serve(*flags, env=ENV) as running:
        yield running
        assert running.stop() == 0


class Client(threading.Thread):
    """Calls again and again on one channel, as soon as it has been answered."""

    def __init__(self, server: ServerProcess, pause: float) -> None:
        super().__init__(daemon=True)
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.hints: list[int] = []
        self._channel = grpc.insecure_channel(server.address, options=OWN)
        self._pause = pause
        self._over = threading.Event()

    def run(self) -> None:
        stub = GenerationServiceStub(self._channel)
        while not self._over.wait(self._pause):
            try:
                generate(stub, SHORT, timeout=60)
                self.codes[grpc.StatusCode.OK] += 1
            except grpc.RpcError as error:
                self.codes[error.code()] += 1
                metadata = dict(error.trailing_metadata() or ())
                if "group is forming" in error.details():
                    self.hints.append(int(metadata["grpc-retry-pushback-ms"]))

    def end(self) -> None:
        self._over.set()
        self.join(60)
        self._channel.close()


def watched(address: str) -> tuple[grpc.Channel, list[Any]]:
    """A channel that is connected, and the states that it has from now on."""
    channel = grpc.insecure_channel(address, options=OWN)
    grpc.channel_ready_future(channel).result(20)
    states: list[Any] = []
    channel.subscribe(states.append)
    wait_for(lambda: states == [grpc.ChannelConnectivity.READY])
    return channel, states


def test_no_call_is_cancelled_and_every_connection_but_the_routers_is_closed(
    server: ServerProcess,
) -> None:
    clients = [Client(server, pause) for pause in (0.0, 0.01, 0.05, 0.3, 1.0)]
    idle, idle_states = watched(server.address)
    router, router_states = watched(f"unix:{server.uds}")
    probes, probe_states = watched(server.health_address)
    for client in clients:
        client.start()
    wait_for(lambda: all(client.codes[grpc.StatusCode.OK] for client in clients))
    kill(engines(server)[1])
    wait_for(lambda: server.health("") != SERVING)
    wait_for(lambda: CLOSING in server.log.read_text())
    wait_for(lambda: grpc.ChannelConnectivity.IDLE in idle_states, log=server.log)
    wait_for(lambda: server.health("") == SERVING, AGAIN_SECONDS, log=server.log)
    served = [client.codes[grpc.StatusCode.OK] for client in clients]
    wait_for(
        lambda: all(
            client.codes[grpc.StatusCode.OK] > before
            for client, before in zip(clients, served, strict=True)
        )
    )
    for client in clients:
        client.end()
    codes = sum((client.codes for client in clients), Counter())
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}, codes
    assert router_states == probe_states == [grpc.ChannelConnectivity.READY]
    # Until the group is there, as far as is known.
    assert max(hint for client in clients for hint in client.hints) > 3000
    for channel in (idle, router, probes):
        channel.close()
    stopped_while_connections_are_closed(server)


def stopped_while_connections_are_closed(server: ServerProcess) -> None:
    """Lose a rank once more, and stop the pod meanwhile: it ends, and cancels nobody."""
    before = server.log.read_text().count(CLOSING)
    client = Client(server, 0.0)
    client.start()
    wait_for(lambda: bool(client.codes[grpc.StatusCode.OK]))
    kill(engines(server)[1])
    wait_for(lambda: server.log.read_text().count(CLOSING) > before)
    time.sleep(0.5)
    assert server.stop() == 0
    client.end()
    assert set(client.codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


@pytest.mark.slow
def test_a_client_that_retries_as_it_is_told_loses_no_call(server: ServerProcess) -> None:
    options = [*OWN, ("grpc.service_config", json.dumps(RETRYING))]
    with grpc.insecure_channel(server.address, options=options) as channel:
        stub = GenerationServiceStub(channel)
        generate(stub, SHORT)
        kill(engines(server)[0])
        wait_for(lambda: server.health("") != SERVING)
        assert generate(stub, SHORT, timeout=AGAIN_SECONDS).samples[0].finished
        assert server.health("startup") == SERVING


@pytest.mark.slow
def test_who_watches_health_hears_of_it_and_is_not_cancelled(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.address, options=OWN) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        heard = [next(watch).status]
        kill(engines(server)[1])
        heard.append(next(watch).status)
        assert heard == [SERVING, NOT_SERVING]
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    wait_for(lambda: server.health("") == SERVING, AGAIN_SECONDS, log=server.log)
