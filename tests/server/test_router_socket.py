"""The unix socket for routers, and what a router may keep from a pod's other callers."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.client import ShardClient, ShardError
from router.double import Router
from router.records import Batch, Request
from router.startup import RouterSettings
from router.streams import Prompt
from router.wire import V2, V3, Wire
from support.clients.public_api import generate, text_request
from support.pods.harness import NOT_SERVING, SERVING, ServerProcess, serve
from support.waiting import wait_for
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb
from tokenpod_client.protos.generate.v3 import generate_pb2_grpc as rpc

ROWS = 2
TEXT = "import os\n"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with few rows, a token, a small limit for a router's messages and short leases."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("secret\n")
    flags = ("--max-batch-size", str(ROWS), "--router-lease", "1", "--uds-group", str(os.getgid()))
    flags += ("--auth-token-file", str(tokens), "--max-router-message-bytes", str(8 << 20))
    with serve(*flags) as running:
        yield running
        assert running.stop() == 0


@asynccontextmanager
async def shard_of(server: ServerProcess, wire: Wire | None = None) -> AsyncIterator[ShardClient]:
    client = ShardClient(server.uds, wire or V3())
    yield client
    await client.clear_cache()
    await client.close()


def batch_of(batch_id: int, n: int, *, new: int = 500, **fields: Any) -> Batch:
    requests = [
        Request(id=100 * batch_id + at, inputs=TEXT, truncate=16, max_new_tokens=new, **fields)
        for at in range(n)
    ]
    return Batch(batch_id, tuple(requests), max_tokens=n * (16 + new), max_blocks=1)


def generated(server: ServerProcess, token: str = "secret") -> Any:
    """What one `Generate` call ends with, over TCP."""
    request = text_request(TEXT, stopping={"max_new_tokens": 2, "ignore_eos": True})
    metadata = (("authorization", f"Bearer {token}"),)
    return generate(server.stub(), request, metadata=metadata, timeout=60)


def test_the_socket_of_a_killed_server_is_gone_until_the_next_has_its_model() -> None:
    with serve() as server:
        path = server.uds
        server.process.kill()
        server.process.wait()
        assert os.path.exists(path)
        again = ("--uds-path", path.removesuffix("-0"))
        with serve(*again, wait=False) as second:
            wait_for(lambda: not os.path.exists(path))
            wait_for(lambda: os.path.exists(path))
            with grpc.insecure_channel(f"unix:{path}") as channel:
                stub = rpc.TextGenerationServiceStub(channel)
                # A router asks this first, and exits if the answer is an error.
                assert list(stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=30).urls)
                assert stub.Info(pb.InfoRequest(), timeout=30).support_chunking
            assert second.stop() == 0
            assert list(Path(path).parent.glob("shard*")) == []


@pytest.mark.parametrize(("group", "mode"), [(None, 0o600), (os.getgid(), 0o660)])
def test_the_sockets_file_mode_guards_it(
    server: ServerProcess, narrow: ServerProcess, group: int | None, mode: int
) -> None:
    found = os.stat((server if group is None else narrow).uds)
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_gid == os.getgid()


async def test_a_router_needs_no_token_and_over_tcp_everybody_does(narrow: ServerProcess) -> None:
    async with shard_of(narrow) as client:
        assert (await client.prefill(batch_of(1, 1))).batch
    async with grpc.aio.insecure_channel(narrow.address) as channel:
        stub = rpc.TextGenerationServiceStub(channel)
        for call in (stub.ClearCache(pb.ClearCacheRequest()), stub.Info(pb.InfoRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_socket_takes_larger_messages_than_the_port(narrow: ServerProcess) -> None:
    # `slots` are of no use to us; a router sends them all the same, in varints of 3 bytes.
    large = pb.Request(id=1, inputs=TEXT, truncate=16, slots=range(100_000, 100_000 + 1_600_000))
    large.stopping_parameters.max_new_tokens = 1
    request = pb.PrefillRequest(batch=pb.Batch(id=1, requests=[large]))
    assert request.ByteSize() > 4 << 20
    metadata = (("authorization", "Bearer secret"),)
    async with grpc.aio.insecure_channel(f"unix:{narrow.uds}") as channel:
        answer = await rpc.TextGenerationServiceStub(channel).Prefill(request)
        assert answer.generations[0].generated_text.generated_tokens == 1
    async with grpc.aio.insecure_channel(narrow.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.TextGenerationServiceStub(channel).Prefill(request, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_batch_that_a_refused_message_was_to_join_is_released(
    narrow: ServerProcess,
) -> None:
    async with shard_of(narrow) as client:
        running = (await client.prefill(batch_of(1, ROWS))).batch
        with pytest.raises(ShardError) as refused:
            await client.prefill(batch_of(2, 1, slots=tuple(range(1 << 22))), running)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        # The router has forgotten both; under load it goes on with others at once, which wait for
        # the rows unless the lease is over by now.
        reply = await client.prefill(batch_of(3, 1, new=3))
        assert reply.batch
        if not reply.generations:
            reply = await client.decode([reply.batch])
        assert reply.of(300).tokens


async def test_rows_that_a_lost_router_had_come_back(narrow: ServerProcess) -> None:
    client = ShardClient(narrow.uds, V3())
    await client.prefill(batch_of(1, ROWS))
    await client.close()
    await asyncio.to_thread(generated, narrow)
    assert narrow.logged("no router has called for a batch")


@pytest.mark.parametrize(
    "wire", [pytest.param(V2(), id="v2", marks=pytest.mark.slow), pytest.param(V3(), id="v3")]
)
async def test_a_router_and_callers_fill_a_pod_and_nobody_fails(wire: Wire) -> None:
    with serve("--max-batch-size", "8", "--max-batch-total-tokens", "600") as server:
        router = await Router.start(
            server.uds,
            wire=wire,
            settings=RouterSettings(
                max_input_tokens=64, max_total_tokens=128, max_batch_prefill_tokens=256
            ),
        )
        prompt = Prompt(text=TEXT, input_length=16, max_new_tokens=40, ignore_eos_token=True)
        request = text_request(TEXT, stopping={"max_new_tokens": 60, "ignore_eos": True})
        calls = [asyncio.to_thread(generate, server.stub(), request) for _ in range(6)]
        routed = [router.generate(prompt) for _ in range(24)]
        results = await asyncio.gather(*routed, *calls)
        assert len({result.text for result in results[:24]}) == 1
        assert {len(each.samples[0].token_ids) for each in results[24:]} == {60}
        await router.stop()
        assert server.stop() == 0


async def test_refused_calls_are_in_the_log(narrow: ServerProcess) -> None:
    async with shard_of(narrow) as client:
        unknown = (await client.prefill(batch_of(77, 1))).batch
        assert unknown
        await client.clear_cache(77)
        with pytest.raises(ShardError):
            await client.decode([unknown])
        await client.prefill(batch_of(78, 1, new=1_000_000))
    (line,) = narrow.logged("a shard rpc was refused rpc=Decode batches=[77] code=NOT_FOUND")
    assert "Batch ID 77 not found" in line
    assert "max_new_tokens is 1000000" in narrow.logged("request=7800")[-1]


async def test_a_drain_serves_those_that_wait_for_a_row() -> None:
    with serve("--max-batch-size", str(ROWS)) as server:
        settings = RouterSettings(max_input_tokens=64, max_total_tokens=600)
        router = await Router.start(server.uds, settings=settings)
        prompt = Prompt(text=TEXT, input_length=16, max_new_tokens=40, ignore_eos_token=True)
        streams = [router.submit(prompt) for _ in range(6)]
        await anext(aiter(streams[0]))
        server.process.terminate()
        results = await asyncio.gather(*(stream.result() for stream in streams))
        assert {result.generated_tokens for result in results} == {40}
        await router.stop()
        assert await asyncio.to_thread(server.process.wait, 60) == 0


async def test_a_pod_whose_rows_a_router_keeps_says_so_until_they_come_back_and_ends_in_time() -> (
    None
):
    flags = ("--max-batch-size", str(ROWS), "--graceful-termination-timeout", "0.5")
    with serve(*flags) as server:
        client = ShardClient(server.uds, V3())
        await client.prefill(batch_of(1, ROWS))
        waiting = threading.Thread(target=generated, args=(server,))
        waiting.start()
        await asyncio.to_thread(wait_for, lambda: server.health() == NOT_SERVING)
        assert server.health("liveness") == SERVING
        await client.clear_cache()
        await asyncio.to_thread(waiting.join)
        await asyncio.to_thread(wait_for, lambda: server.health() == SERVING)
        # A drain that is over answers an open Decode.
        await client.prefill(batch_of(1, ROWS))
        waits = (await client.prefill(batch_of(2, 1))).batch
        assert waits
        blocked = asyncio.create_task(client.decode([waits]))
        await asyncio.sleep(0)
        server.process.terminate()
        with pytest.raises(ShardError) as ended:
            await blocked
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE
        assert "draining" in str(ended.value)
        await client.close()
        assert await asyncio.to_thread(server.process.wait, 60) == 0
