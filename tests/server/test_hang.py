"""An engine that hangs: new calls are refused, running ones end, and so does the pod."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import grpc
import pytest

from support.clients.public_api import generate, text_request
from support.pods.faults import PROMPT, Call, stop
from support.pods.groups import ENV, FLAGS
from support.pods.harness import SERVING, ServerProcess, serve
from support.waiting import wait_for

#: Seconds without a sign of the engine after which a pod gives up.
STALL = 7
#: Far above what a stalled pod takes to end, far below its drain.
END_SECONDS = 45
STALLED = ("--stall-timeout", str(STALL), "--graceful-termination-timeout", "600")
SHORT = text_request(PROMPT, stopping={"max_new_tokens": 3, "ignore_eos": True})


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with serve(*FLAGS, *STALLED, env=ENV) as running:
        yield running


def hang(server: ServerProcess) -> Call:
    """Stop the engine while a call runs that would take long."""
    running = Call(server, PROMPT, 1500)
    running.wait_for_token()
    stop(server.engine_pid())
    return running


def refusal(server: ServerProcess) -> grpc.Call:
    """How a new call is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(server.stub(), SHORT, timeout=END_SECONDS)
    return caught.value  # type: ignore[return-value]


def ends_undrained(server: ServerProcess) -> None:
    assert server.process.wait(END_SECONDS) == 1
    assert "engine was lost" in server.log.read_text()


def test_calls_given_up_leave_no_doubt_about_an_engine_that_runs_but_hides_none_that_hangs(
    server: ServerProcess,
) -> None:
    long = text_request(PROMPT, stopping={"max_new_tokens": 1500, "ignore_eos": True})
    for seconds in (0.05, 0.1, 0.2, 0.4):
        with pytest.raises(grpc.RpcError):
            generate(server.stub(), long, timeout=seconds)
    with pytest.raises(AssertionError):
        # Longer than readiness would take to go.
        wait_for(lambda: server.health() != SERVING, seconds=7)
    stop(server.engine_pid())
    with pytest.raises(grpc.RpcError) as caught:
        generate(server.stub(), SHORT, timeout=1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    ends_undrained(server)


def test_a_hung_engine_refuses_new_calls_then_fails_running_ones_and_ends(
    server: ServerProcess,
) -> None:
    running = hang(server)
    wait_for(lambda: server.health() != SERVING)
    error = refusal(server)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details() == "the engine makes no progress"
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == "5000"
    assert running.code is None, "it is given the whole time"
    assert server.health("liveness") == SERVING
    ends_undrained(server)
    running.seconds(0.0)
    assert running.code is grpc.StatusCode.UNAVAILABLE
    text = server.log.read_text()
    assert "(--stall-timeout)" in text
    assert "draining" not in text


@pytest.mark.slow
def test_an_engine_that_goes_on_in_time_is_as_before(server: ServerProcess) -> None:
    running = hang(server)
    wait_for(lambda: server.health() != SERVING)
    os.kill(server.engine_pid(), signal.SIGCONT)
    wait_for(lambda: server.health() == SERVING)
    assert len(generate(server.stub(), SHORT).samples[0].token_ids) == 3
    running.seconds(0.0)
    assert running.code is None
    assert server.stop() == 0


@pytest.mark.slow
def test_a_front_end_that_stood_still_does_not_end_a_healthy_engine(server: ServerProcess) -> None:
    running = Call(server, PROMPT, 300)
    running.wait_for_token()
    stop(server.process.pid)
    time.sleep(2 * STALL)
    os.kill(server.process.pid, signal.SIGCONT)
    running.seconds(0.0)
    assert running.code is None, server.log.read_text()
    assert server.health("liveness") == SERVING
    assert server.stop() == 0


@pytest.mark.slow
def test_a_drain_does_not_wait_for_a_hung_engine(server: ServerProcess) -> None:
    running = hang(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(END_SECONDS) == 1
    running.seconds(0.0)
    assert running.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_all_front_ends_refuse_and_end() -> None:
    with serve(*FLAGS, *STALLED, "--front-ends", "3", env=ENV) as pod:
        engine = next(pid for pid in pod.children() if "engine" in command(pid))
        calls = [Call(pod, PROMPT, 1500) for _ in range(6)]
        for call in calls:
            call.wait_for_token()
        stop(engine)
        wait_for(lambda: pod.health() != SERVING)
        codes = {refusal(pod).details() for _ in range(6)}
        assert codes == {"the engine makes no progress"}
        ends_undrained(pod)
        for call in calls:
            call.seconds(0.0)
            assert call.code is grpc.StatusCode.UNAVAILABLE


def command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as arguments:
        return arguments.read()
