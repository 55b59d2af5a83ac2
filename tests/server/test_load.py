"""Too much load, and clients that leave, stall or come too late: what others notice of it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from support.clients.public_api import generate, text_request
from support.pods.harness import NOT_SERVING, SERVING, ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as v3
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2 import GetLoadRequest
from tokenpod_client.protos.tokenpod.v1.generation_service_pb2_grpc import GenerationServiceStub

SLOTS = 1200
#: Holds more than half of the slots for as long as it runs.
HOLDER = {"max_new_tokens": 1000, "ignore_eos": True}
#: Fits only once the holder is gone.
NEXT = {"max_new_tokens": 900, "ignore_eos": True}
SHORT = {"max_new_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def tight() -> Iterator[ServerProcess]:
    """A server with slots for one long request, and places for three."""
    with serve(
        *("--max-batch-total-tokens", str(SLOTS)),
        *("--max-concurrent-requests", "3", "--max-queue-tokens", "200"),
    ) as running:
        assert "kv_slots_from=--max-batch-total-tokens" in running.log.read_text()
        yield running
        assert running.stop() == 0


def test_all_calls_are_taken_that_four_full_batches_hold() -> None:
    """Fields of config.json that the operator replaces count, and are logged."""
    override = '{"max_position_embeddings":1024}'
    with serve("--max-batch-size", "24", "--config-override", override) as server:
        said = server.log.read_text()
        assert "config_override=" in said
        assert "max_concurrent_requests=96 max_queue_tokens=" in said
        assert 'kv_slots_from="24 sequences of 1024 tokens' in said
        stub = server.stub()
        request = text_request("import os\n", stopping=SHORT)
        calls = [stub.Generate(request, timeout=60) for _ in range(96)]
        for call in calls:
            assert [event.WhichOneof("event") for event in call][-1] == "completed"
        assert server.stop() == 0


def hold(stub: Any, **call: Any) -> Any:
    """A stream that has begun and holds its slots."""
    stream = stub.Generate(text_request("import os\n", stopping=HOLDER), timeout=120, **call)
    assert next(stream).WhichOneof("event") == "started"
    return stream


def refusal(stub: Any, request: Any, **call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as refused:
        generate(stub, request, **call)
    return refused.value


def outcome(stub: Any, request: Any) -> grpc.StatusCode:
    call = stub.Generate(request, timeout=20)
    with contextlib.suppress(grpc.RpcError):
        list(call)
    return call.code()


def assert_free(stub: Any) -> None:
    """All slots and places are free: a request that needs most of them runs."""
    deadline = time.monotonic() + 20
    request = text_request("import os\n", stopping={"max_new_tokens": 1, "ignore_eos": True})
    # A place is given back when the server hears of the end, which is soon, not at once.
    while (code := outcome(stub, request)) is not grpc.StatusCode.OK:
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert time.monotonic() < deadline, "no place was given back"
        time.sleep(0.02)
    stream = stub.Generate(text_request("import os\n", stopping=NEXT), timeout=20)
    assert next(stream).WhichOneof("event") == "started"
    stream.cancel()


def test_a_request_too_many_is_refused_at_once_while_probes_are_answered(
    tight: ServerProcess,
) -> None:
    stub = tight.stub()
    streams = [hold(stub)]
    waiting = text_request("import sys\n", stopping=NEXT)
    streams += [stub.Generate(waiting, timeout=120) for _ in range(2)]
    for stream in streams[1:]:
        stream.initial_metadata()
    for _ in range(20):
        error = refusal(stub, text_request("x", stopping=SHORT))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-concurrent-requests" in error.details()
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
    # They did not wait: what was there before them still does.
    assert not any(stream.done() for stream in streams)
    assert tight.health() == SERVING
    assert tight.health("liveness") == SERVING
    for stream in streams:
        stream.cancel()
    assert_free(stub)


def test_a_prompt_that_overflows_the_queue_is_refused(tight: ServerProcess) -> None:
    stub = tight.stub()
    holder = hold(stub)
    ids = {"ids": [5] * 150}
    waiting = stub.Generate(pb.GenerateRequest(token_ids=ids, stopping=NEXT), timeout=120)
    waiting.initial_metadata()
    time.sleep(0.1)
    error = refusal(stub, pb.GenerateRequest(token_ids=ids, stopping=SHORT))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-queue-tokens" in error.details()
    holder.cancel()
    waiting.cancel()
    assert_free(stub)


def test_a_cancel_frees_slots_and_place(tight: ServerProcess) -> None:
    stub = tight.stub()
    for _ in range(5):
        hold(stub).cancel()
        assert_free(stub)


def test_a_deadline_in_the_stream_frees_slots_and_place(tight: ServerProcess) -> None:
    stub = tight.stub()
    with pytest.raises(grpc.RpcError) as ended:
        for _ in stub.Generate(text_request("import os\n", stopping=HOLDER), timeout=0.3):
            pass
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert_free(stub)


_CLIENT = """
import sys, time, grpc
from tokenpod_client.protos.tokenpod.v1 import generation_pb2 as pb, generation_service_pb2_grpc
stub = generation_service_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
stopping = pb.StoppingOptions(max_new_tokens=1000, ignore_eos=True)
next(stub.Generate(pb.GenerateRequest(text="import os", stopping=stopping)))
print("started", flush=True)
time.sleep(100)
"""


def test_a_client_that_is_killed_frees_slots_and_place(tight: ServerProcess) -> None:
    command = [sys.executable, "-P", "-c", _CLIENT, tight.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "started\n"
        client.send_signal(signal.SIGKILL)
    assert_free(tight.stub())


def test_a_deadline_that_passes_in_the_queue_costs_no_token(tight: ServerProcess) -> None:
    stub = tight.stub()
    holder = hold(stub)
    stream = stub.Generate(text_request("import os\n", stopping=NEXT), timeout=0.2)
    with pytest.raises(grpc.RpcError) as ended:
        next(stream)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    holder.cancel()
    assert_free(stub)


def test_a_time_limit_that_passes_in_the_queue_ends_without_tokens(tight: ServerProcess) -> None:
    stub = tight.stub()
    holder = hold(stub)
    request = text_request("import os\n", stopping={**NEXT, "time_limit": {"nanos": 100_000_000}})
    (sample,) = generate(stub, request).samples
    assert sample.token_ids == []
    assert sample.finished.finish_reason == pb.FINISH_REASON_TIME_LIMIT
    holder.cancel()
    assert_free(stub)


@pytest.mark.parametrize(
    ("priorities", "expected"), [((0, 5), [1, 0]), ((0, 0), [0, 1])], ids=["priority", "fcfs"]
)
def test_who_waits_goes_by_priority_and_then_in_order(
    tight: ServerProcess, priorities: tuple[int, int], expected: list[int]
) -> None:
    stub = tight.stub()
    holder = hold(stub)
    order: list[int] = []

    def begin(name: int, call: Any) -> None:
        next(call)
        order.append(name)
        # Only one fits at a time: the other begins after this.
        call.cancel()

    threads = []
    for name, priority in enumerate(priorities):
        request = text_request("import os\n", stopping=NEXT, priority=priority)
        call = stub.Generate(request, timeout=60)
        call.initial_metadata()
        threads.append(threading.Thread(target=begin, args=(name, call)))
    time.sleep(0.1)
    for thread in threads:
        thread.start()
    holder.cancel()
    for thread in threads:
        thread.join(60)
    assert order == expected
    assert_free(stub)


def test_waiting_for_a_router_to_let_go_is_no_reason_for_a_restart(tight: ServerProcess) -> None:
    stub, shard = tight.stub(), tight.shard()
    held = v3.Request(id=1, inputs="import os\n", stopping_parameters={"max_new_tokens": 1000})
    shard.Prefill(v3.PrefillRequest(batch=v3.Batch(id=5, requests=[held], size=1)), timeout=60)
    waiting = stub.Generate(text_request("import sys\n", stopping=NEXT), timeout=120)
    # Readiness goes: nobody gets anything here meanwhile.
    wait_for(lambda: tight.health("readiness") == NOT_SERVING)
    assert tight.health("liveness") == SERVING
    shard.ClearCache(v3.ClearCacheRequest(), timeout=60)
    assert next(waiting).WhichOneof("event") == "started"
    waiting.cancel()
    wait_for(lambda: tight.health("readiness") == SERVING)
    assert_free(stub)


# -- deadlines beyond the load that can be served ------------------------------------------------

ROWS = 8


@pytest.fixture(scope="module")
def rushed() -> Iterator[ServerProcess]:
    """A server with few rows, a long queue, and calls that it has seen."""
    with serve("--max-batch-size", str(ROWS), "--max-concurrent-requests", "2000") as running:
        stub = running.stub()
        for _ in range(3):
            calls = [stub.Generate(of_ids(32), timeout=60) for _ in range(2 * ROWS)]
            for call in calls:
                list(call)
        yield running
        assert running.stop() == 0


def of_ids(new_tokens: int) -> pb.GenerateRequest:
    """A request without a text to tokenise."""
    stopping = {"max_new_tokens": new_tokens, "ignore_eos": True}
    return pb.GenerateRequest(token_ids={"ids": [544, 606, 17]}, stopping=stopping)


def run_seconds(stub: Any) -> float:
    """What a call takes among as many as run at once."""
    began = time.monotonic()
    for call in [stub.Generate(of_ids(32), timeout=60) for _ in range(ROWS)]:
        list(call)
    return time.monotonic() - began


def test_of_a_burst_with_deadlines_those_are_taken_in_who_will_be_served(
    rushed: ServerProcess,
) -> None:
    """However fast the pod is. How many end in time beyond its load: service/test_turnover.py."""
    stub = rushed.stub()
    seconds = 10 * run_seconds(stub)
    # Whoever comes behind these waits for five times as long. A connection has 256 calls at most.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as channels:
        queue = []
        for _ in range(2):
            channel = channels.enter_context(grpc.insecure_channel(rushed.address, options))
            theirs = GenerationServiceStub(channel)
            queue += [theirs.Generate(of_ids(1000)) for _ in range(25 * ROWS)]
        wait_for(
            lambda: stub.GetLoad(GetLoadRequest(), timeout=9).waiting_sequence_count >= 48 * ROWS
        )
        hurried = [stub.Generate(of_ids(32), timeout=seconds) for _ in range(8 * ROWS)]
        patient = [stub.Generate(of_ids(8), timeout=x) for x in (600, None) for _ in range(ROWS)]
        for call in hurried:
            assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "deadline is" in call.details()
            hint = dict(call.trailing_metadata())["grpc-retry-pushback-ms"]
            assert 1000 <= int(hint) <= 30_000
    # The queue has gone with its connections. Who has no deadline is not asked about it.
    for call in patient:
        assert [event.WhichOneof("event") for event in call][-1] == "completed"


def test_who_is_refused_for_a_deadline_costs_no_message(rushed: ServerProcess) -> None:
    stub = rushed.stub()
    seconds = 3 * run_seconds(stub)
    holders = [stub.Generate(of_ids(1000), timeout=120) for _ in range(8 * ROWS)]
    next(holders[0])
    refused = rushed.channel().stream_stream("/tokenpod.v1.GenerationService/Generate")(
        iter(()), timeout=seconds
    )
    # It has no message, and is not told so.
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "deadline" in refused.details()
    for holder in holders:
        holder.cancel()
