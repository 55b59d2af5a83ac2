"""The fake shard keeps every promise that the real server is held to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from router.client import ShardClient, ShardError
from router.conformance import *  # noqa: F403
from router.conformance.fixtures import ask, assert_gone, batch_of, cached, finish
from router.fake_shard import FakeShard
from router.wire import V3

#: The real server keeps all of them in every run (tests/server/test_router.py).
pytestmark = pytest.mark.sampled(6, "slow", by_turns=True)


@pytest.fixture(params=[True, False], ids=["chunked", "whole"])
async def shard_address(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    path = str(tmp_path / "shard-0")
    async with FakeShard(path, support_chunking=request.param, use_prefix_caching=request.param):
        yield path


# --- what only a shard in this process can be asked to do -------------------------------------


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ShardClient]:
    client = ShardClient(str(tmp_path / "own-0"), V3())
    yield client
    await client.close()


async def test_a_decode_waits_for_rows_that_others_hold(client: ShardClient) -> None:
    async with FakeShard(client.path, rows=2) as fake:
        leave = fake.rows.occupy(2)
        reply = await client.prefill(batch_of(0, ask(0), ask(1)))
        assert reply.generations == ()
        decode = asyncio.create_task(client.decode([cached(reply)]))
        await client.health()
        assert not decode.done()
        leave()
        assert len((await decode).generations) == 2


async def test_a_batch_waits_for_slots_that_another_holds(client: ShardClient) -> None:
    async with FakeShard(client.path, capacity=40):
        first = await client.prefill(batch_of(0, ask(0, "x" * 20, max_new_tokens=8)))
        second = await client.prefill(batch_of(1, ask(1, "x" * 20, max_new_tokens=8)))
        assert second.generations == ()
        await finish(client, await client.decode([cached(first)]))
        assert len((await client.decode([cached(second)])).generations) == 1


async def test_a_prefill_that_never_fits_is_refused(client: ShardClient) -> None:
    async with FakeShard(client.path, capacity=40):
        with pytest.raises(ShardError) as caught:
            await client.prefill(batch_of(0, ask(0, "x" * 20), ask(1, "x" * 20)))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_batch_that_nobody_names_is_released(client: ShardClient) -> None:
    async with FakeShard(client.path, rows=2, lease=0.05):
        await client.prefill(batch_of(0, ask(0), ask(1)))
        second = await client.prefill(batch_of(1, ask(2)))
        # Its own lease is not counted while a call waits with it.
        assert len((await client.decode([cached(second)])).generations) == 1
        await assert_gone(client, 0)


async def test_a_batch_outlives_a_caller_that_waited_with_it(client: ShardClient) -> None:
    async with FakeShard(client.path, rows=1) as fake:
        leave = fake.rows.occupy(1)
        batch = cached(await client.prefill(batch_of(0, ask(0))))
        decode = asyncio.create_task(client.decode([batch]))
        await client.health()
        decode.cancel()
        leave()
        assert len((await client.decode([batch])).generations) == 1


async def test_clearing_a_batch_ends_the_call_that_waits_with_it(client: ShardClient) -> None:
    async with FakeShard(client.path, rows=1) as fake:
        fake.rows.occupy(1)
        batch = cached(await client.prefill(batch_of(0, ask(0))))
        decode = asyncio.create_task(client.decode([batch]))
        await client.health()
        await client.clear_cache()
        with pytest.raises(ShardError, match="Batch ID 0 not found"):
            await decode


async def test_a_drain_serves_what_was_taken_and_keeps_joins_away(client: ShardClient) -> None:
    async with FakeShard(client.path, support_chunking=True, rows=2) as fake:
        reply = await client.prefill(batch_of(0, *(ask(i) for i in range(3))))
        drain = asyncio.create_task(fake.drain(60))
        await client.health()
        reply = await client.decode([cached(reply)])
        assert cached(reply).max_tokens >= 20_000
        stories = await finish(client, reply)
        assert sorted(stories) == [0, 1, 2]
        await drain
        with pytest.raises(ShardError) as caught:
            await client.prefill(batch_of(1, ask(4)))
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_drain_ends_with_an_answer_to_whoever_is_not_done(client: ShardClient) -> None:
    async with FakeShard(client.path, rows=1) as fake:
        fake.rows.occupy(1)
        waiting = cached(await client.prefill(batch_of(0, ask(0))))
        parked = cached(await client.prefill(batch_of(1, ask(1))))
        decode = asyncio.create_task(client.decode([waiting]))
        await client.health()
        drain = asyncio.create_task(fake.drain(0))
        with pytest.raises(ShardError) as caught:
            await decode
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        # Between an answer with a batch and what it calls for, the shard does not end.
        assert not drain.done()
        assert await client.filter_batch(1, [1]) is not None
        with pytest.raises(ShardError):
            await client.decode([parked])
        await drain
