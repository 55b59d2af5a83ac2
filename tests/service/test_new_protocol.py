"""A protocol is its rows: one that no layer knows is guarded, limited, traced and described."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from support.outside.collector import Collector, collecting
from tokenpod.service.admission.admission import Admission
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.listen import public_server
from tokenpod.service.rpc.methods import SMALL, Gate, MethodTable, method_of
from tokenpod.service.serving.backend import Backend
from tokenpod.service.serving.generate import GenerateService
from tokenpod.service.telemetry.choice import telemetry_of
from tokenpod.service.telemetry.recorder import Telemetry

SERVICE = "acme.v1.EchoService"
TOKEN = (("authorization", "Bearer first-token"),)


def file() -> Any:
    """A proto file that is not this project's, with a service of two rpcs."""
    text = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    word = descriptor_pb2.DescriptorProto(name="Word")
    word.field.add(name="text", number=1, type=text, label=1, json_name="text")
    found = descriptor_pb2.FileDescriptorProto(
        name="acme/v1/echo.proto", package="acme.v1", syntax="proto3", message_type=[word]
    )
    service = found.service.add(name="EchoService")
    for name in ("Say", "Generate"):
        service.method.add(name=name, input_type=".acme.v1.Word", output_type=".acme.v1.Word")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(found.SerializeToString())
    return pool.FindFileByName("acme/v1/echo.proto")


DESCRIPTOR = file()
Word: Any = GetMessageClass(DESCRIPTOR.message_types_by_name["Word"])


async def say(backend: Backend, request: Any, context: Any) -> Any:
    return Word(text=request.text[::-1])


ROWS = [
    method_of(DESCRIPTOR.services_by_name["EchoService"], name, SMALL, gate=gate, serve=say)
    for name, gate in (("Say", Gate.NONE), ("Generate", Gate.READY))
]


class Server:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, name: str, text: str, metadata: Any = TOKEN) -> str:
        """The answer, or the code of the refusal."""
        ask: Any = self.channel.unary_unary(
            f"/{SERVICE}/{name}", Word.SerializeToString, Word.FromString
        )
        try:
            return str((await ask(Word(text=text), metadata=metadata, timeout=20)).text)
        except grpc.aio.AioRpcError as error:
            return error.code().name


@pytest.fixture
async def server(tmp_path: Path, telemetry: Telemetry) -> AsyncIterator[Server]:
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\n")
    admission, table = Admission(max_requests=9, max_queue_tokens=9), MethodTable([*TABLE, *ROWS])
    generate = GenerateService(admission)
    backend = Backend(table, admission, generate, healthy=lambda: True)
    settings = ServerSettings(auth_token_file=tokens)
    public, _ = public_server(settings, backend, telemetry.interceptors(table))
    await HealthBoard().add_to(public, table.served)
    port = public.add_insecure_port("127.0.0.1:0")
    await public.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Server(channel)
    await public.stop(None)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture
def telemetry(collector: Collector) -> Telemetry:
    return telemetry_of(
        ServerSettings(otlp_endpoint=collector.endpoint, otlp_service_name="tokenpod-test")
    )


async def test_it_answers_callers_with_a_token_alone(server: Server) -> None:
    assert await server.call("Say", "abc") == "cba"
    assert await server.call("Say", "abc", metadata=()) == "UNAUTHENTICATED"


async def test_its_limits_and_its_gate_hold(server: Server) -> None:
    assert await server.call("Say", "x" * 5000) == "INVALID_ARGUMENT"
    # The model is not ready.
    assert await server.call("Generate", "abc") == "UNAVAILABLE"


async def test_it_has_a_health_status_and_is_described(server: Server) -> None:
    health: Any = health_pb2_grpc.HealthStub(server.channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
    assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"{SERVICE}.Say"),
    ]
    listed, described = [
        answer async for answer in stub.ServerReflectionInfo(iter(asked), metadata=TOKEN)
    ]
    assert SERVICE in {service.name for service in listed.list_services_response.service}
    assert described.file_descriptor_response.file_descriptor_proto


async def test_it_is_traced_and_counted(
    server: Server, telemetry: Telemetry, collector: Collector
) -> None:
    await server.call("Say", "abc")
    telemetry.shutdown()
    assert [span.name for span in collector.spans] == [f"{SERVICE}/Say"]
