"""Reflection as the real grpcurl (v1alpha) and the real buf (v1) use it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from support.clients.rpcs import Running, Scripted, serving
from tokenpod.service.protocols import TABLE
from tokenpod.service.rpc.health import HealthBoard
from tokenpod.service.rpc.interceptors import ErrorInterceptor
from tokenpod.service.rpc.reflection import V1, V1ALPHA, enable_reflection

SERVICE = "generate.v3.TextGenerationService"
PUBLIC = "tokenpod.v1.GenerationService"
ADAPTERS = "tokenpod.v1.AdapterService"
HEALTH = "grpc.health.v1.Health"
SERVED = {SERVICE, PUBLIC, ADAPTERS, HEALTH, V1, V1ALPHA}
TOOLS = Path(sys.executable).parent


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    async def prepare(server: grpc.aio.Server) -> None:
        await HealthBoard().add_to(server, [SERVICE])
        rows = [row for row in TABLE if row.service in SERVED]
        enable_reflection(rows, server)

    async with serving(
        servicer=Scripted(), interceptors=[ErrorInterceptor()], prepare=prepare
    ) as running:
        yield running


async def tool(name: str, *arguments: str) -> str:
    """Run a real client; its output. The server runs on this loop meanwhile."""
    process = await asyncio.create_subprocess_exec(
        TOOLS / name,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def grpcurl(*arguments: str) -> str:
    return await tool("grpcurl", "-plaintext", *arguments)


async def buf_curl(protocol: str, *arguments: str) -> str:
    reflect = ["--reflect", "--reflect-protocol", protocol]
    return await tool(
        "buf", "curl", "--http2-prior-knowledge", "--protocol", "grpc", *reflect, *arguments
    )


@pytest.mark.pod
async def test_grpcurl_lists_what_is_served(server: Running) -> None:
    listed = (await grpcurl(server.address, "list")).split()
    assert listed == sorted([SERVICE, PUBLIC, ADAPTERS, HEALTH, V1, V1ALPHA])


@pytest.mark.pod
async def test_grpcurl_describes_everything_that_is_listed(server: Running) -> None:
    for name in (await grpcurl(server.address, "list")).split():
        assert f"{name} is a service" in await grpcurl(server.address, "describe", name)


@pytest.mark.pod
async def test_grpcurl_describes_the_generate_rpc(server: Running) -> None:
    described = await grpcurl(server.address, "describe", f"{SERVICE}.Generate")
    assert "returns ( stream .generate.v3.GenerateResponse )" in described


@pytest.mark.pod
async def test_grpcurl_calls_unary_and_streaming_rpcs(server: Running) -> None:
    info = json.loads(await grpcurl("-d", "{}", server.address, f"{SERVICE}/Info"))
    assert info["dtype"] == "float32"
    stream = await grpcurl("-d", '{"text": "x"}', server.address, f"{SERVICE}/Generate")
    assert stream.index('"started"') < stream.index('"tokens"')


@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
@pytest.mark.pod
async def test_buf_lists_and_calls_with_either_protocol(server: Running, protocol: str) -> None:
    url = f"http://{server.address}"
    listed = await buf_curl(protocol, "--list-methods", url)
    assert f"{SERVICE}/Generate" in listed
    info = await buf_curl(protocol, "-d", "{}", f"{url}/{SERVICE}/Info")
    assert json.loads(info)["dtype"] == "float32"


@pytest.mark.parametrize("service", [V1, V1ALPHA])
async def test_both_protocols_give_the_same_answers(server: Running, service: str) -> None:
    method = server.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such")

    listed, described, unknown = [answer async for answer in method(ask())]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {SERVICE, PUBLIC, ADAPTERS, HEALTH, V1, V1ALPHA}
    assert described.file_descriptor_response.file_descriptor_proto
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
