"""Messages that are made to hold up a server: what they cost it, on real processes.

Costs are the front end's own processor time and memory, which do not depend on who else runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from support.clients import wirefuzz
from support.clients.public_api import violations
from support.clients.shard_generate import generate
from support.clients.wirefuzz import Rpc
from support.examples import ALL as EVERY
from support.pods.costs import cpu_seconds, forget_peak, peak_bytes
from support.pods.harness import SERVING, ServerProcess, serve
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

MOST_BYTES = 4 * 1024 * 1024
ALL = wirefuzz.rpcs()
#: Ten times what such a message takes, a fifth of what the cheapest of them took unbounded.
CPU_SECONDS = 0.6
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    #: A batch that the bytes happen to name.
    grpc.StatusCode.NOT_FOUND,
    #: A method that is not built, whatever it is asked.
    grpc.StatusCode.UNIMPLEMENTED,
}


def filled(unit: bytes) -> bytes:
    """As many of `unit` as a message of the port may hold."""
    return unit * (MOST_BYTES // len(unit) - 1)


def nested(tag: int, unit: bytes) -> bytes:
    """The same within a field of the request."""
    inner = unit * ((MOST_BYTES - 16) // len(unit))
    return bytes([tag << 3 | 2]) + wirefuzz.varint(len(inner)) + inner


#: Methods whose messages hold all that such bytes can be; others get every fourth kind, or all.
LARGEST = ("Generate", "Prefill")
HOSTILE = {
    "empty fields": filled(b"\x0a\x00"),
    "unknown fields": filled(b"\xf8\x7f\x01"),
    "groups": filled(b"\x0b\x0c"),
    "numbers": filled(b"\x48\x01"),
    "noise": bytes(range(255, 0, -1)) * 16_000,
    "an endless varint": b"\x80" * (MOST_BYTES - 100),
    "empty entries of the second field's list": nested(2, b"\x0a\x00"),
    "empty entries of the first field's list": nested(1, b"\x12\x00"),
    "empty stop sequences": nested(5, b"\x1a\x00"),
    "biases": nested(4, b"\x52\x00"),
    "packed numbers": nested(2, b"\x0a\x64" + b"\x01" * 100),
    "not UTF-8 at the end": b"\x0a" + wirefuzz.varint(MOST_BYTES - 100) + b"x" * (MOST_BYTES - 100)
    + b"\x42\x01\xff",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    """A server of its own: what it spends is looked at."""
    with serve("--kv-cache-events") as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def is_long_text(rpc: Rpc, data: bytes) -> bool:
    try:
        return len(getattr(rpc.request_class.FromString(data), "text", "")) > 1000
    except DecodeError:
        return False


def answer(channel: grpc.Channel, rpc: Rpc, data: bytes) -> grpc.StatusCode:
    """The code that a call ends with."""
    try:
        rpc.send(channel, data)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def refusal(channel: grpc.Channel, rpc: Rpc, data: bytes) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        rpc.send(channel, data)
    return caught.value


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_message_of_any_method_costs_more_than_a_look(plain: ServerProcess, kind: str) -> None:
    data, turn = HOSTILE[kind], [*HOSTILE].index(kind)
    with grpc.insecure_channel(plain.address) as channel:
        for at, rpc in enumerate(ALL):
            if not EVERY and rpc.method.name not in LARGEST and (at + turn) % 6:
                continue
            if is_long_text(rpc, data):
                # What is a list elsewhere is tokenised here.
                continue
            before = cpu_seconds(plain.process.pid)
            code = answer(channel, rpc, data)
            spent = cpu_seconds(plain.process.pid) - before
            # To some methods it is one large field that nobody knows.
            assert code in {*REFUSALS, grpc.StatusCode.OK}, f"{rpc}: {code}"
            assert spent < CPU_SECONDS, f"{rpc} took {spent} s"
    assert plain.health() == SERVING


def test_what_is_too_large_for_its_method_is_refused_by_its_size(plain: ServerProcess) -> None:
    data = pb.FilterBatchRequest(batch_id=1, request_ids=[2**63] * 200_000).SerializeToString()
    (rpc,) = [each for each in ALL if str(each) == "v3.FilterBatch"]
    with grpc.insecure_channel(plain.address) as channel:
        problem = violations(refusal(channel, rpc, data))["request"]
    assert problem == f"has {len(data)} bytes; this method takes at most 1048576"


def test_lists_are_refused_by_their_name(plain: ServerProcess) -> None:
    request = pb.GenerateRequest(token_ids={"ids": [1] * 300_000})
    with pytest.raises(grpc.RpcError) as caught:
        list(plain.shard().Generate(request, timeout=30))
    assert "at most 262144 numbers" in violations(caught.value)["token_ids.ids"]


def test_large_messages_that_are_legal_are_served(plain: ServerProcess) -> None:
    stub = plain.shard()
    ids = pb.GenerateRequest(
        token_ids={"ids": [300] * 200_000}, truncate=8, stopping={"max_new_tokens": 2}
    )
    assert generate(stub, ids).samples[0].finished
    messages = [{"role": "user", "content": "x"}] * 2_000
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(chat={"messages": messages}), timeout=60))
    assert "fields" not in violations(caught.value).get("chat.messages", "")


@pytest.mark.parametrize("port", ["port", "health port"])
def test_a_probe_of_megabytes_is_refused_before_it_costs_anything(
    plain: ServerProcess, port: str
) -> None:
    address = plain.address if port == "port" else plain.health_address
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        before = cpu_seconds(plain.process.pid)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                check(filled(b"\xf8\x7f\x01"), timeout=30)
            assert caught.value.code() in REFUSALS
        assert cpu_seconds(plain.process.pid) - before < 5 * CPU_SECONDS
    assert plain.health() == SERVING


def test_a_call_that_is_refused_costs_no_message(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token\n")
    limit = 256 * 1024 * 1024
    flags = ("--auth-token-file", str(tokens), "--max-message-bytes", str(limit))
    with serve(*flags) as guarded:
        pid = guarded.process.pid
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(guarded.address, options=options) as channel:
            data = b"\x0a\x00" * (100 * 1024 * 1024)
            forget_peak(pid)
            before = peak_bytes(pid)
            for name in ("Prefill", "Generate"):
                (rpc,) = [each for each in ALL if str(each) == f"v3.{name}"]
                error = refusal(channel, rpc, data)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert peak_bytes(pid) - before < 100 * 1024 * 1024
