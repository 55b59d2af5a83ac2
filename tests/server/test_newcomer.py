"""A protocol is a codec, its rows and their line in the table: a small one is served so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.clients.public_api import violations
from support.pods import newcomer_pod
from support.pods.harness import ServerProcess, serve
from support.pods.newcomer.messages import message
from tokenpod_client import Client

TEXT = "class Stack:\n    def push"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve(script=newcomer_pod.__file__) as running:
        yield running


def ask(server: ServerProcess, method: str, request: Any, answer: str) -> Any:
    with server.channel() as channel:
        call: Any = channel.unary_unary(
            f"/newcomer.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=message(answer).FromString,
        )
        return call(request, timeout=30)


def test_it_says_what_is_served(server: ServerProcess) -> None:
    info = ask(server, "Info/Info", message("InfoRequest")(), "InfoResponse")
    with Client(server.address) as client:
        model = client.model()
    assert info.model_id == model.name
    assert info.max_input_length == model.limits.max_input_tokens


def test_it_tokenises_as_every_protocol_does(server: ServerProcess) -> None:
    request = message("EncodeRequest")(inputs=TEXT, add_special_tokens=True)
    tokens = ask(server, "Tokenize/Tokenize", request, "EncodeResponse").tokens
    with Client(server.address) as client:
        assert [token.id for token in tokens] == client.tokenize(TEXT)
    plain = [token for token in tokens if not token.special]
    assert "".join(TEXT[token.start : token.stop] for token in plain) == TEXT


def test_its_errors_name_its_own_fields(server: ServerProcess) -> None:
    request = message("EncodeRequest")(inputs="x y " * 150_000)
    with pytest.raises(grpc.RpcError) as refused:
        ask(server, "Tokenize/Tokenize", request, "EncodeResponse")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations(refused.value)) == {"inputs"}


def test_its_services_have_a_health_status(server: ServerProcess) -> None:
    with server.channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("newcomer.v1.Info", "newcomer.v1.Tokenize"):
            status = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30).status
            assert status == health_pb2.HealthCheckResponse.SERVING
