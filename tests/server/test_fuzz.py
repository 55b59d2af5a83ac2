"""Random requests of every rpc, in any order and at once: nothing breaks, and nothing is forgotten.

Requests begin plain and have some fields replaced, by extremes or by plausible values, so that many
get past the checks and into the engine. FUZZ_EXAMPLES says how many sequences of calls are
tried (30, half a minute, by make test-all); they are the same in every run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.clients import wirefuzz
from support.clients.shard_generate import generate
from support.clients.wirefuzz import F, Rpc
from support.pods.harness import SERVING, ServerProcess, serve
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10"))
#: A call that takes longer hangs.
HANG_SECONDS = 60.0
ANSWERS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    #: Of tokenpod.v1 alone: fields that are not built, two calls of one name.
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.ALREADY_EXISTS,
    #: Of adapters that come and go, which the operator has not switched on.
    grpc.StatusCode.FAILED_PRECONDITION,
}
#: Values that get past the checks more often than extremes do.
PLAUSIBLE: dict[int, tuple[Any, ...]] = {
    F.TYPE_UINT32: (2, 3, 5, 17, 64, 300),
    F.TYPE_UINT64: (5, 6, 7, 8),
    F.TYPE_INT32: (-100, 7, 100),
    F.TYPE_INT64: (1, 60),
    F.TYPE_FLOAT: (0.3, 0.9, 1.5, 2.0),
    F.TYPE_BOOL: (),
    F.TYPE_STRING: ("x", "def f(x):\n    return", "Größe 你好 😀", "user"),
    F.TYPE_BYTES: (b"\x89PNG",),
    F.TYPE_ENUM: (),
}
REFERENCE = pb.GenerateRequest(text=wirefuzz.PROMPT, stopping={"max_new_tokens": 16})


@dataclass(frozen=True)
class Call:
    """A request, and what its client does: it waits, leaves, or goes on meanwhile."""

    rpc: Rpc
    data: bytes
    manner: str

    def __repr__(self) -> str:
        return f"{self.rpc} {self.manner} {self.data[:200]!r}"


def _values(field: Any) -> st.SearchStrategy[Any]:
    extremes = st.sampled_from(wirefuzz.extremes(field))
    plausible = PLAUSIBLE.get(field.type, ())
    if not plausible or field.message_type is not None:
        return extremes
    likely = st.sampled_from(plausible)
    return (st.lists(likely, max_size=4) if field.is_repeated else likely) | extremes


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """One call: mostly a well-formed message with odd values, sometimes not even that."""
    rpc = draw(st.sampled_from(BUSY))
    request = rpc.plain()
    paths = list(wirefuzz.paths(rpc.method.input_type))
    for path in draw(st.lists(st.sampled_from(paths), max_size=4)) if paths else ():
        wirefuzz.put(request, path, draw(_values(path[-1])))
    data = request.SerializeToString()
    if draw(st.integers(0, 19)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=8)) + data[at + draw(st.integers(0, 8)) :]
    return Call(rpc, data, draw(st.sampled_from(("wait", "wait", "leave", "meanwhile"))))


#: Generate, Prefill and Decode more often than the rest: they reach the engine.
BUSY = [
    rpc
    for rpc in wirefuzz.rpcs()
    for _ in range(
        {"Generate": 9, "GenerateStream": 4, "Prefill": 4, "Decode": 4}.get(rpc.method.name, 1)
    )
]


@pytest.fixture(scope="module")
def house() -> Iterator[ServerProcess]:
    """A server of its own: its log and its processes are looked at in the end."""
    with serve("--kv-cache-events") as running:
        yield running


def _play(channel: grpc.Channel, script: list[Call]) -> None:
    """Make the calls in order; those of `meanwhile` are answered in the end."""
    open_calls = []
    for call in script:
        started = _start(channel, call)
        if call.manner == "wait":
            _answer(call, started)
        elif call.manner == "leave":
            _leave(call, started)
        else:
            open_calls.append((call, started))
    for call, started in open_calls:
        _answer(call, started)
    wirefuzz.clear(channel)


def _start(channel: grpc.Channel, call: Call) -> Any:
    method = call.rpc.method
    path = f"/{method.containing_service.full_name}/{method.name}"
    if method.server_streaming:
        return channel.unary_stream(path)(call.data, timeout=HANG_SECONDS)
    return channel.unary_unary(path).future(call.data, timeout=HANG_SECONDS)


def _answer(call: Call, started: Any) -> None:
    try:
        if call.rpc.method.server_streaming:
            list(itertools.islice(started, wirefuzz.ENOUGH_EVENTS))
            started.cancel()
        else:
            started.result()
    except grpc.RpcError as error:
        _expect_answer(call, error)


def _expect_answer(call: Call, error: grpc.RpcError) -> None:
    assert error.code() in ANSWERS, f"{call}: {error}"


def _leave(call: Call, started: Any) -> None:
    """Hang up: a stream after its first event, anything else at once."""
    try:
        if call.rpc.method.server_streaming:
            next(started, None)
    except grpc.RpcError as error:
        _expect_answer(call, error)
    started.cancel()


def test_nothing_that_a_client_sends_breaks_the_server(house: ServerProcess) -> None:
    stub, channel, engine = house.shard(), house.channel(), house.engine_pid()
    expected = generate(stub, REFERENCE).samples[0].token_ids

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(calls(), min_size=1, max_size=8))
    def play(script: list[Call]) -> None:
        stream = stub.Generate(REFERENCE, timeout=HANG_SECONDS)
        _play(channel, script)
        tokens = [token for event in stream for token in event.tokens.token_ids]
        assert tokens == expected, "a stream noticed what else was going on"

    play()
    assert house.process.poll() is None
    assert house.engine_pid() == engine
    assert house.health() == SERVING
    assert generate(stub, REFERENCE).samples[0].token_ids == expected
    assert house.stop() == 0
    log = house.log.read_text()
    assert "internal error" not in log
    assert "Traceback" not in log
