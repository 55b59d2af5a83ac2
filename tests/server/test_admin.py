"""What operators ask of a pod that runs: its status, its log's level, stacks, profiles."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.clients.public_api import SHORT, generate, refused, text_request
from support.pods.harness import TOKENPOD, ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.admin.v1 import admin_service_pb2 as pb
from tokenpod_client.protos.tokenpod.admin.v1.admin_service_pb2_grpc import AdminServiceStub
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as service_pb

TOKEN = (("authorization", "Bearer operator"),)
LONG = {"max_new_tokens": 1900, "ignore_eos": True}
PROCESSES = ["front-end-0", "engine", "front-end-1"]


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("operator\n")
    with serve("--front-ends", "2", "--admin-token-file", str(tokens)) as server:
        yield server


def admin(server: ServerProcess) -> Any:
    return AdminServiceStub(server.channel())


def status(server: ServerProcess) -> pb.GetStatusResponse:
    found: pb.GetStatusResponse = admin(server).GetStatus(
        pb.GetStatusRequest(), metadata=TOKEN, timeout=60
    )
    return found


def calls(server: ServerProcess) -> dict[str, int]:
    return {each.status: each.count for each in status(server).calls}


def test_operators_alone_are_answered(pod: ServerProcess) -> None:
    for metadata in ((), (("authorization", "Bearer other"),)):
        with pytest.raises(grpc.RpcError) as caught:
            admin(pod).GetStatus(pb.GetStatusRequest(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_without_the_operators_word_nobody_is(server: ServerProcess) -> None:
    for ask in (
        lambda: admin(server).GetStatus(pb.GetStatusRequest(), metadata=TOKEN),
        lambda: admin(server).DumpStacks(pb.DumpStacksRequest(), metadata=TOKEN),
        lambda: admin(server).TakeProfile(pb.TakeProfileRequest(), metadata=TOKEN),
        lambda: admin(server).SetLogLevel(pb.SetLogLevelRequest(level=1), metadata=TOKEN),
    ):
        error = refused(grpc.StatusCode.FAILED_PRECONDITION, ask)
        assert "--admin-token-file" in (error.details() or "")


def test_the_status_counts_calls_of_all_front_ends_and_tokens(pod: ServerProcess) -> None:
    before, counted = status(pod), calls(pod)
    stubs = [pod.stub() for _ in range(8)]
    for stub in stubs:
        generate(stub, text_request("def ", stopping=SHORT))
        with pytest.raises(grpc.RpcError):
            stub.Generate(text_request("def ", stopping={"max_new_tokens": 10**6})).next()
    after = status(pod)
    assert calls(pod)["INVALID_ARGUMENT"] == counted.get("INVALID_ARGUMENT", 0) + 8
    # The calls of this test, and those that asked.
    assert calls(pod)["OK"] >= counted["OK"] + 8
    assert after.generated_token_count == before.generated_token_count + 64
    assert after.step_count > before.step_count
    assert after.load.prompt_token_count > before.load.prompt_token_count
    assert after.ready
    assert [each.name for each in after.processes] == PROCESSES
    assert len({each.pid for each in after.processes}) == 3


def test_stacks_are_of_every_process_and_show_no_values(pod: ServerProcess) -> None:
    answer = admin(pod).DumpStacks(pb.DumpStacksRequest(), metadata=TOKEN)
    found = {each.process: each.stacks for each in answer.processes}
    assert list(found) == PROCESSES
    assert "EngineLoop.turn" in found["engine"]
    for name in ("front-end-0", "front-end-1"):
        assert "thread MainThread" in found[name]
        assert "operator" not in found[name]
    (one,) = admin(pod).DumpStacks(pb.DumpStacksRequest(process="engine"), metadata=TOKEN).processes
    assert one.process == "engine"
    with pytest.raises(grpc.RpcError) as caught:
        admin(pod).DumpStacks(pb.DumpStacksRequest(process="x"), metadata=TOKEN)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_process_that_hangs_says_nothing_and_the_others_answer(pod: ServerProcess) -> None:
    pid = next(each.pid for each in status(pod).processes if each.name == "front-end-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = pod_admin_first(pod).DumpStacks(pb.DumpStacksRequest(), metadata=TOKEN)
    finally:
        os.kill(pid, signal.SIGCONT)
    found = {each.process: each.stacks for each in answer.processes}
    assert found["front-end-1"] == "no answer in 2 s"
    assert "EngineLoop.turn" in found["engine"]


def pod_admin_first(server: ServerProcess) -> Any:
    """A stub whose calls the first front end takes: by the router's socket."""
    return AdminServiceStub(server.channel(f"unix:{server.uds}"))


def test_a_profile_shows_the_engines_steps_while_it_serves(pod: ServerProcess) -> None:
    running = pod.stub().Generate(text_request("def ", stopping=LONG))
    next(running)
    # Whichever comes first is taken, and another is refused while that lasts.
    stub, request = admin(pod), pb.TakeProfileRequest(seconds=1)
    asked = [stub.TakeProfile.future(request, metadata=TOKEN) for _ in range(4)]
    refusals = [call.exception(60) for call in asked]
    running.cancel()
    codes = {refusal.code() for refusal in refusals if refusal is not None}
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    answer = next(call.result() for call in asked if call.exception() is None)
    assert answer.process == "engine"
    lines = answer.folded_stacks.splitlines()
    assert all(line.rpartition(" ")[2].isdigit() for line in lines)
    assert any("engine.loop:EngineLoop.turn;" in line for line in lines)


def debug_lines(server: ServerProcess, request_id: str) -> bool:
    """Whether a call that is logged at severity debug alone is in the log."""
    for _ in range(4):
        server.stub().GetLoad(
            service_pb.GetLoadRequest(), metadata=[("x-request-id", request_id)], timeout=60
        )
    server.stub().GetModel(
        service_pb.GetModelRequest(), metadata=[("x-request-id", f"{request_id}-end")], timeout=60
    )
    wait_for(lambda: f"{request_id}-end" in server.log.read_text())
    return f"request_id={request_id} " in server.log.read_text()


def test_the_level_changes_by_rpc_and_by_signal_in_every_front_end(pod: ServerProcess) -> None:
    assert not debug_lines(pod, "usual")
    request = pb.SetLogLevelRequest(level=pb.LOG_LEVEL_DEBUG)
    answer = admin(pod).SetLogLevel(request, metadata=TOKEN)
    assert answer.previous_level == pb.LOG_LEVEL_INFO
    assert status(pod).log_level == pb.LOG_LEVEL_DEBUG
    wait_for(lambda: all(debug_lines(pod, f"debug-{number}") for number in range(4)))
    pod.process.send_signal(signal.SIGUSR1)
    wait_for(lambda: status(pod).log_level == pb.LOG_LEVEL_INFO)
    wait_for(lambda: not debug_lines(pod, "again"))


def command(server: ServerProcess, *arguments: str) -> str:
    done = subprocess.run(
        [*TOKENPOD, *arguments, "--address", server.address, "--token", "operator"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_the_commands_show_it(pod: ServerProcess, tmp_path: Path) -> None:
    shown = command(pod, "top", "--count", "2", "--every", "0.2")
    assert shown.count("output tokens/s") == 2
    assert "demo; ready" in shown
    assert "OK/s" in shown
    assert "=== engine: process" in command(pod, "stacks", "--process", "engine")
    assert "MainThread;" in command(pod, "profile", "--seconds", "1", "--process", "front-end-0")
    assert command(pod, "log-level", "warning") == "info -> warning\n"
    assert command(pod, "log-level", "info") == "warning -> info\n"
