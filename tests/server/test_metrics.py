"""A pod with two front ends, scraped: what it says of mixed calls, and when it is idle."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from support.clients.public_api import generate, text_request
from support.pods.harness import free_port, serve
from support.pods.metrics import Pod
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

METHOD = "tokenpod.v1.GenerationService/Generate"
SHORT = {"max_new_tokens": 6, "ignore_eos": True}
LONG = {"max_new_tokens": 1900, "ignore_eos": True}
MOST_REQUESTS = 5


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    port = free_port()
    flags = ["--metrics-port", str(port), "--metrics-names", "vllm,tgi", "--front-ends", "2"]
    with serve(*flags, "--max-concurrent-requests", str(MOST_REQUESTS)) as server:
        yield Pod(server, port)


@contextlib.contextmanager
def connection(pod: Pod) -> Iterator[Any]:
    """Of its own: the kernel gives it to one of the front ends."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(pod.server.address, options=options) as channel:
        yield GenerationServiceStub(channel)


class Clients:
    """Calls of every kind, and what became of them."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.codes = Counter[str]()
        self.tokens = 0

    def finish(self, _: int) -> None:
        with connection(self._pod) as stub:
            stream = generate(stub, text_request("import os\n", stopping=SHORT))
        self.codes["OK"] += 1
        self.tokens += stream.samples[0].finished.generated_token_count

    def cancel(self, _: int) -> None:
        with connection(self._pod) as stub:
            call = stub.Generate(text_request("import os\n", stopping=LONG), timeout=120)
            next(call)
            next(call)
            call.cancel()
        self.codes["CANCELLED"] += 1

    def fail(self, code: str, request: Any, **options: Any) -> None:
        with connection(self._pod) as stub:
            call = stub.Generate(request, **{"timeout": 120, **options})
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
        assert raised.value.code().name == code
        self.codes[code] += 1


def test_the_counters_of_mixed_calls_are_those_of_the_clients(pod: Pod) -> None:
    before, clients = pod.scrape(), Clients(pod)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(clients.finish, range(9)))
        list(threads.map(clients.cancel, range(5)))
    for _ in range(3):
        clients.fail("INVALID_ARGUMENT", text_request("x", stopping={"max_new_tokens": 10**8}))
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(MOST_REQUESTS):
            stub = stack.enter_context(connection(pod))
            running.append(stub.Generate(text_request("x", stopping=LONG), timeout=120))
            next(running[-1])
        held = pod.scrape()
        assert held.sum("tokenpod_requests_admitted") == MOST_REQUESTS
        for _ in range(4):
            clients.fail("RESOURCE_EXHAUSTED", text_request("x", stopping=SHORT))
        for call in running:
            call.cancel()
            clients.codes["CANCELLED"] += 1
    name = "rpc_server_call_duration_seconds_count"

    def counted() -> dict[str, float]:
        now = pod.scrape()
        found = {
            code: now.sum(name, rpc_method=METHOD, rpc_response_status_code=code)
            - before.sum(name, rpc_method=METHOD, rpc_response_status_code=code)
            for code in clients.codes
        }
        return found

    # A cancelled call ends here a moment after it has ended for its client.
    wait_for(lambda: counted() == clients.codes)
    after = pod.scrape()

    def failed(**labels: str) -> float:
        return after.sum("tokenpod_calls_failed_total", **labels) - before.sum(
            "tokenpod_calls_failed_total", **labels
        )

    assert failed(tokenpod_reason="max_concurrent_requests") == 4
    assert failed(tokenpod_reason="invalid_field", tokenpod_phase="admission") == 3
    assert failed(tokenpod_reason="cancelled") == clients.codes["CANCELLED"]
    assert failed(tokenpod_reason="cancelled", tokenpod_phase="decode") >= 5
    # Of calls that ended well: cancelled ones have used tokens that their clients did not read.
    ok = {"gen_ai_token_type": "output"}
    usage = "gen_ai_client_token_usage"
    assert after.sum(f"{usage}_sum", **ok) >= clients.tokens == 9 * SHORT["max_new_tokens"]
    assert after.sum("gen_ai_server_request_duration_seconds_count") == (
        clients.codes["OK"] + clients.codes["CANCELLED"]
    )
    assert after.sum("tgi_request_success") == clients.codes["OK"]
    assert after.sum("tokenpod_requests_ended_total", tokenpod_end="length") == clients.codes["OK"]


def test_the_gauges_of_an_idle_pod_are_right(pod: Pod) -> None:
    clients = Clients(pod)
    clients.finish(0)
    wait_for(lambda: pod.scrape().sum("tokenpod_requests_admitted") == 0)
    idle = pod.scrape()
    for name in ("queue_requests", "queue_tokens", "requests_running", "kv_utilization_ratio"):
        assert idle.sum(f"tokenpod_{name}") == 0, name
    assert idle.sum("tokenpod_calls_memory_bytes") == 0
    assert idle.sum("tokenpod_ready") == 1
    assert idle.sum("tokenpod_engine_stalled") == 0
    assert idle.sum("tokenpod_kv_tokens", tokenpod_kv_state="used") == 0
    assert idle.sum("tokenpod_kv_tokens", tokenpod_kv_state="evictable") > 0, "the prefix is cached"
    steps, rows = (idle.sum(f"tokenpod_steps{part}_total") for part in ("", "_rows"))
    assert 0 < steps <= rows
    assert idle.sum("tokenpod_steps_time_seconds_total") > 0
    assert pod.scrape().sum("tokenpod_steps_total") == steps, "an idle engine makes no steps"
    blocks = [one for one in idle.samples if one.name == "vllm:cache_config_info"]
    assert int(blocks[0].labels["num_gpu_blocks"]) > 0


def test_slow_scrapers_hold_up_neither_streams_nor_other_scrapers(pod: Pod) -> None:
    """They would, for ever, if either waited for them."""
    with contextlib.ExitStack() as stack:
        for at in range(12):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", pod.metrics_port)))
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"\r\n" if at % 2 else b"Ac"))
        clients = Clients(pod)
        for _ in range(3):
            clients.finish(0)
        assert pod.scrape().sum("tokenpod_ready") == 1


def test_a_port_in_use_ends_the_start_with_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve("--metrics-port", str(port), wait=False) as server:
            assert server.process.wait(60) == 1
            (line,) = server.log.read_text().splitlines()
    where = f"127.0.0.1:{port} (--metrics-port)"
    assert line == f"error: cannot listen on {where}: the address is in use"
