"""The options of the public server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import grpc

from support.clients import floods
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


#: The queue of calls that Python has not taken is shorter by this: 1,024 calls are soon sent.
SHORTER = 64


async def test_calls_that_clients_gave_up_cancel_no_others() -> None:
    """They wait in gRPC's queue, dead, for as long as Python is busy."""
    options = [
        (name, value // SHORTER if name.startswith("grpc.server.max_pending") else value)
        for name, value in channel_options(ServerSettings(device="cpu"), shared_port=False)
    ]
    server = grpc.aio.server(options=options)
    rpc.add_TextGenerationServiceServicer_to_server(Scripted(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ends: Counter[str] = Counter()

    def call(stub: rpc.TextGenerationServiceStub) -> None:
        try:
            stub.Info(pb.InfoRequest(), timeout=30)
            ends["OK"] += 1
        except grpc.RpcError as error:
            ends[error.code().name] += 1

    def clients() -> None:
        given_up = floods.given_up("/generate.v3.TextGenerationService/Info")
        with floods.opened(port) as connection, grpc.insecure_channel(f"127.0.0.1:{port}") as own:
            for _ in range(16):
                connection.sendall(next(given_up))
                time.sleep(0.1)
            stub = rpc.TextGenerationServiceStub(own)
            calls = [threading.Thread(target=call, args=[stub]) for _ in range(20)]
            for each in calls:
                each.start()
            time.sleep(0.5)
            free.set()
            for each in calls:
                each.join()

    free = threading.Event()
    calling = asyncio.create_task(asyncio.to_thread(clients))
    try:
        await asyncio.sleep(0.1)
        # Python is busy.
        free.wait(30)
        await calling
        assert ends == {"OK": 20}
    finally:
        await server.stop(None)
