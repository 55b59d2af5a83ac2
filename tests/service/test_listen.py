"""The options of the public server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from support.clients.rpcs import Scripted
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.rpc.listen import channel_options
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

#: Ages of connections are made shorter by this: what an option ends after ten minutes ends in 2 s.
FASTER = 300


async def test_a_running_call_outlives_its_connections_age_by_any_time() -> None:
    async def act(context: Any) -> None:
        await asyncio.sleep(6)

    settings = ServerSettings(max_connection_age_seconds=300)
    options = [
        (name, value // FASTER if name.startswith("grpc.max_connection_age") else value)
        for name, value in channel_options(settings, shared_port=False)
    ]
    server = grpc.aio.server(options=options)
    rpc.add_TextGenerationServiceServicer_to_server(Scripted(act), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            generate = rpc.TextGenerationServiceStub(channel).Generate
            events = [event async for event in generate(pb.GenerateRequest(), timeout=60)]
            assert [event.WhichOneof("event") for event in events] == ["started", "tokens"]
    finally:
        await server.stop(None)
