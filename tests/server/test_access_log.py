"""Access lines of a pod: one for each call, however it ends, and no stream that waits for them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from support.clients.public_api import SHORT, generate, text_request
from support.pods.harness import ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.tokenpod.v1 import generation_service_pb2 as pb

SECRET = "the secret of the prompt"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
GENERATE = "tokenpod.v1.GenerationService/Generate"
PIPE_BYTES = 4096


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("one\nother\n")
    flags = ["--front-ends", "2", "--json-output", "--auth-token-file", str(tokens)]
    with serve(*flags) as server:
        yield server


def lines_of(server: ServerProcess, request_id: str) -> list[dict[str, Any]]:
    """Access lines of this request."""
    entries = [json.loads(line) for line in server.log.read_text().splitlines() if line[:1] == "{"]
    return [
        entry
        for entry in entries
        if entry["logger"] == "tokenpod.access" and entry.get("request_id") == request_id
    ]


def line_of(server: ServerProcess, request_id: str) -> dict[str, Any]:
    """The one access line of this request."""
    wait_for(lambda: bool(lines_of(server, request_id)))
    (line,) = lines_of(server, request_id)
    return line


def metadata(request_id: str, token: str = "one") -> list[tuple[str, str]]:
    return [("x-request-id", request_id), ("authorization", f"Bearer {token}")]


def test_a_stream_has_a_line_with_its_times_and_tokens_and_no_text(pod: ServerProcess) -> None:
    parent = ("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")
    request = text_request(SECRET, stopping=SHORT)
    stream = generate(pod.stub(), request, metadata=[*metadata("whole"), parent])
    line = line_of(pod, "whole")
    assert (line["rpc"], line["status"], line["level"]) == (GENERATE, "OK", "INFO")
    assert line["output_tokens"] == 8
    assert line["prompt_tokens"] == stream.started.prompt_token_count
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert (line["finish"], line["trace_id"]) == ("length", TRACE_ID)
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    text = pod.log.read_text()
    assert "secret" not in text
    assert "Bearer" not in text
    assert stream.samples[0].text not in text


def test_callers_are_told_apart(pod: ServerProcess) -> None:
    for name, token in (("first", "one"), ("again", "one"), ("theirs", "other")):
        pod.stub().GetModel(pb.GetModelRequest(), metadata=metadata(name, token))
    first, again, theirs = (line_of(pod, name)["caller"] for name in ("first", "again", "theirs"))
    assert first == again != theirs


@pytest.mark.parametrize(
    ("name", "token", "given", "status", "reason"),
    [
        ("no-token", "none", {"max_new_tokens": 4}, "UNAUTHENTICATED", "bad_token"),
        ("too-many", "one", {"max_new_tokens": 10**6}, "INVALID_ARGUMENT", "invalid_field"),
    ],
)
def test_a_refused_call_has_a_line(
    pod: ServerProcess, name: str, token: str, given: dict[str, int], status: str, reason: str
) -> None:
    with pytest.raises(grpc.RpcError):
        generate(pod.stub(), text_request(SECRET, stopping=given), metadata=metadata(name, token))
    line = line_of(pod, name)
    assert (line["rpc"], line["status"], line["reason"]) == (GENERATE, status, reason)
    assert line["phase"] == "admission"


def test_a_cancelled_call_has_a_line(pod: ServerProcess) -> None:
    request = text_request(SECRET, stopping={"max_new_tokens": 1500, "ignore_eos": True})
    call = pod.stub().Generate(request, metadata=metadata("left"))
    next(call)
    call.cancel()
    line = line_of(pod, "left")
    assert (line["status"], line["reason"], line["phase"]) == ("CANCELLED", "cancelled", "decode")
    assert line["output_tokens"] >= 1


def test_frequent_calls_have_none_unless_they_fail(pod: ServerProcess) -> None:
    pod.stub().GetLoad(pb.GetLoadRequest(), metadata=metadata("load"))
    with pytest.raises(grpc.RpcError):
        pod.stub().GetLoad(pb.GetLoadRequest(), metadata=metadata("load-refused", "none"))
    assert line_of(pod, "load-refused")["status"] == "UNAUTHENTICATED"
    assert lines_of(pod, "load") == []


@pytest.fixture(params=["full disk", "stopped reader"])
def unread(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    """A pod whose log can't be written."""
    where = Path("/dev/full")
    with contextlib.ExitStack() as stack:
        if request.param == "stopped reader":
            where = tmp_path / "log"
            os.mkfifo(where)
            reader = os.open(where, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, reader)
            fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        yield stack.enter_context(serve(stderr=where))


def test_a_log_that_cannot_be_written_slows_no_stream(unread: ServerProcess) -> None:
    stub = unread.stub()
    # Each has a line: many times what a pipe of this size takes.
    for _ in range(10 * PIPE_BYTES // 200):
        stub.GetModel(pb.GetModelRequest(), timeout=60)
    stream = generate(stub, text_request("def ", stopping=SHORT), timeout=60)
    assert stream.samples[0].finished.generated_token_count == 8
    assert unread.stop() == 0
