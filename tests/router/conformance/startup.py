"""Start-up, Info, Health and the cache's housekeeping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from router.client import ShardClient
from router.conformance.fixtures import (
    PROMPTS,
    SMALL,
    ask,
    assert_gone,
    batch_of,
    cached,
    finish,
)
from router.conformance.promises import assert_ended_alone
from router.double import Router
from router.records import FinishReason
from router.startup import RouterSettings, warmup_batch
from router.wire import V1, V3, WIRES, Wire


def is_socket(path: str) -> bool:
    return Path(path).is_absolute() and Path(path).is_socket()


async def test_a_router_without_limits_starts(shard_address: str) -> None:
    router = await Router.start(shard_address, settings=RouterSettings())
    assert 0 < router.limits.max_input_tokens < router.limits.max_total_tokens
    await router.stop()


@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_a_router_with_limits_starts(shard_address: str, wire: Wire) -> None:
    router = await Router.start(shard_address, wire=wire, settings=SMALL)
    assert router.limits.max_input_tokens == SMALL.max_input_tokens
    assert router.limits.max_total_tokens == SMALL.max_total_tokens
    await router.stop()


async def test_warmup_echoes_the_limits_and_tells_the_token_budget(shard: ShardClient) -> None:
    reply = await shard.warmup(warmup_batch(shard.wire, SMALL), 40, 80, 72)
    assert (reply.max_input_tokens, reply.max_total_tokens) == (40, 72)
    assert reply.max_supported_total_tokens >= 72


async def test_a_request_may_fill_the_total_of_warmup_and_no_more(shard_address: str) -> None:
    """Positions beyond the context are computed for nobody, whatever a router asks for."""
    router = await Router.start(shard_address, settings=RouterSettings())
    total = router.limits.max_total_tokens
    await router.stop()
    shard = ShardClient(shard_address, V3())
    long = ask(0, PROMPTS[2] * total, truncate=total - 3, max_new_tokens=3)
    reply = await shard.prefill(batch_of(0, long, replace(long, id=1, max_new_tokens=4)))
    assert_ended_alone(reply, 1)
    story = (await finish(shard, reply))[0]
    assert (len(story.ids), story.end.finish_reason) == (3, FinishReason.LENGTH)
    await shard.close()


async def test_every_generation_learns_the_same_token_budget(shard_address: str) -> None:
    budgets = set()
    for wire in WIRES:
        client = ShardClient(shard_address, wire)
        reply = await client.warmup(warmup_batch(wire, SMALL), 40, 80, 72)
        budgets.add(reply.max_supported_total_tokens)
        await client.close()
    assert len(budgets) == 1


async def test_warmup_leaves_no_batch_behind(any_shard: ShardClient) -> None:
    await any_shard.warmup(warmup_batch(any_shard.wire, SMALL), 40, 80, 72)
    await assert_gone(any_shard, 0)


async def test_info_says_what_a_router_needs(any_shard: ShardClient) -> None:
    info = await any_shard.info()
    assert info.dtype
    assert info.device_type in {"cpu", "cuda", "xpu", "hpu"}
    assert info.block_size >= 1
    assert info.window_size is None or info.window_size > 0


async def test_service_discovery_names_unix_sockets_that_exist(any_shard: ShardClient) -> None:
    paths = await any_shard.service_discovery()
    assert paths
    assert all(is_socket(path) for path in paths)


async def test_health_answers(any_shard: ShardClient) -> None:
    await any_shard.health()


async def test_clear_cache_forgets_every_batch_however_often(any_shard: ShardClient) -> None:
    await any_shard.prefill(batch_of(1, ask(0)))
    await any_shard.clear_cache()
    await any_shard.clear_cache()
    await assert_gone(any_shard, 1)


async def test_clear_cache_of_one_batch_leaves_the_others(any_shard: ShardClient) -> None:
    await any_shard.prefill(batch_of(1, ask(0)))
    other = cached(await any_shard.prefill(batch_of(2, ask(1))))
    await any_shard.clear_cache(1)
    await any_shard.clear_cache(1)
    await any_shard.clear_cache(2**63)
    assert (await any_shard.decode([other])).of(1).tokens
    await assert_gone(any_shard, 1)


@pytest.mark.parametrize("wire", [V1(), V3()], ids=str)
async def test_tokens_counts_as_prefill_does(shard_address: str, wire: Wire) -> None:
    client = ShardClient(shard_address, wire)
    story = await client.prefill(
        batch_of(0, ask(0, PROMPTS[2], max_new_tokens=1, prefill_logprobs=True))
    )
    prefill = story.of(0).prefill_tokens
    assert prefill is not None
    assert await client.tokens(PROMPTS[2]) == len(prefill.ids)
    await client.close()
