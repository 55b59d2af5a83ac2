"""Stopping while a router holds batches: they come to their end, and hold up nobody for long."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from router.client import ShardClient, ShardError, Shards
from router.double import Router
from router.records import Batch, CachedBatch, Request
from router.startup import RouterSettings, agree_on_limits
from router.streams import GenerationError, Prompt, Result, Stream
from router.wire import V2, V3, Wire
from support.pods.groups import ENV, FLAGS, pods
from support.pods.harness import NOT_SERVING, ServerProcess, serve
from support.waiting import wait_for

TEXT = "import os\n"
TOKENS = 400


def prompt(tokens: int = TOKENS) -> Prompt:
    return Prompt(text=TEXT, input_length=16, max_new_tokens=tokens, ignore_eos_token=True)


@asynccontextmanager
async def router_of(*shards: str, wire: Wire | None = None) -> AsyncIterator[Router]:
    """A router with these shards, by their sockets or addresses."""
    wire = wire or V3()
    clients = Shards([ShardClient(shard, wire) for shard in shards])
    await clients.clear_cache()
    settings = RouterSettings(max_input_tokens=64, max_total_tokens=1024)
    info, limits = await agree_on_limits(clients, wire, settings)
    router = Router(clients, wire, settings, info, limits, seed=1)
    try:
        yield router
    finally:
        await router.stop()


async def started(router: Router, *prompts: Prompt) -> list[Stream]:
    """Streams of prompts whose first token has come."""
    streams = [router.submit(each) for each in prompts]
    for stream in streams:
        await anext(aiter(stream))
    return streams


async def results(streams: Sequence[Stream]) -> list[Result]:
    return list(await asyncio.gather(*(stream.result() for stream in streams)))


async def draining(server: ServerProcess) -> None:
    """SIGTERM, and new work is refused from here on."""
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(wait_for, lambda: server.health() == NOT_SERVING)
    await asyncio.sleep(0.2)


async def status_of(server: ServerProcess) -> int:
    return await asyncio.to_thread(server.process.wait, 40)


def cut_off(server: ServerProcess) -> tuple[int, int]:
    """Requests and batches that the server's last line says it cut off."""
    (line,) = (line for line in server.log.read_text().splitlines() if "stopped" in line)
    said = dict(word.split("=") for word in line.split() if "=" in word)
    return int(said["cut_off"]), int(said["cut_off_batches"])


def batch(batch_id: int) -> Batch:
    request = Request(id=batch_id, inputs=TEXT, truncate=16, max_new_tokens=50)
    return Batch(batch_id, (request,), max_tokens=66, max_blocks=66)


async def prefilled(client: ShardClient, batch_id: int) -> CachedBatch:
    reply = await client.prefill(batch(batch_id))
    assert reply.batch is not None
    return reply.batch


@pytest.mark.parametrize(
    "wire", [pytest.param(V2(), id="v2", marks=pytest.mark.slow), pytest.param(V3(), id="v3")]
)
async def test_what_a_router_has_begun_comes_to_its_end(wire: Wire) -> None:
    with serve(*FLAGS, env=ENV) as server:
        async with router_of(server.uds, wire=wire) as router:
            streams = await started(router, prompt(200), prompt(170), prompt(TOKENS // 3))
            await draining(server)
            assert not streams[2].over
            for result in await results(streams):
                assert len(result.tokens) == result.generated_tokens
            assert [stream.over for stream in streams] == [True] * 3
            with pytest.raises(GenerationError):
                await router.generate(prompt())
        assert await status_of(server) == 0
        assert cut_off(server) == (0, 0)


async def test_a_drain_refuses_new_batches_and_goes_on_with_old_ones() -> None:
    with serve(*FLAGS, env=ENV) as server:
        client = ShardClient(server.uds, V3())
        first, second = await prefilled(client, 1), await prefilled(client, 2)
        await draining(server)
        with pytest.raises(ShardError) as refused:
            await client.prefill(batch(3))
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(ShardError) as refused:
            await client.prefill(batch(3), CachedBatch(404, (404,), 1, 66))
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        both = (await client.decode([first, second])).batch
        assert both is not None
        # A router would give up its running requests if those that join them were refused.
        joined = (await client.prefill(batch(3), both)).batch
        assert joined is not None
        assert set(joined.request_ids) == {1, 2, 3}
        kept = await client.filter_batch(joined.id, [3])
        assert kept is not None
        assert len((await client.decode([kept])).generations) == 1
        assert server.process.poll() is None
        await client.clear_cache(kept.id)
        await client.close()
        assert await status_of(server) == 0
        assert cut_off(server) == (0, 0)


async def test_a_batch_that_its_router_left_behind_does_not_hold_the_pod() -> None:
    with serve(*FLAGS, "--graceful-termination-timeout", "600", env=ENV) as server:
        client = ShardClient(server.uds, V3())
        await prefilled(client, 1)
        await client.close()
        server.process.send_signal(signal.SIGTERM)
        assert await status_of(server) == 0
        assert cut_off(server) == (0, 1)


async def test_a_drain_ends_in_time_though_a_router_goes_on() -> None:
    with serve(*FLAGS, "--graceful-termination-timeout", "0.5", env=ENV) as server:
        async with router_of(server.uds) as router:
            (stream,) = await started(router, prompt(900))
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(GenerationError):
                await stream.result()
        assert await status_of(server) == 0
        assert cut_off(server) == (0, 1)


async def test_what_a_router_calls_after_the_refusal_is_answered() -> None:
    with serve(*FLAGS, "--graceful-termination-timeout", "0.5", env=ENV) as server:
        client = ShardClient(server.uds, V3())
        long = Batch(1, (Request(id=1, inputs=TEXT, truncate=16, max_new_tokens=1900),), 1915, 1915)
        held = (await client.prefill(long)).batch

        async def go_on(held: CachedBatch | None) -> None:
            while held is not None:
                held = (await client.decode([held])).batch

        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ShardError) as refused:
            await go_on(held)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        await client.clear_cache(1)
        with pytest.raises(ShardError) as refused:
            await client.prefill(batch(2))
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        assert "draining" in str(refused.value)
        await client.close()
        assert await status_of(server) == 0
        assert cut_off(server) == (0, 1)


@pytest.mark.parametrize(
    "stopped",
    [pytest.param(1, id="follower"), pytest.param(0, id="leader")],
)
@pytest.mark.slow
async def test_a_groups_router_is_waited_for_whichever_pod_stops(stopped: int) -> None:
    with pods(2) as group:
        async with router_of(group.leader.uds) as router:
            streams = await started(router, prompt(60), prompt(40))
            group.pods[stopped].process.send_signal(signal.SIGTERM)
            for result in await results(streams):
                assert len(result.tokens) == result.generated_tokens
        assert await status_of(group.pods[stopped]) == 0
        if stopped == 0:
            assert cut_off(group.leader) == (0, 0)
