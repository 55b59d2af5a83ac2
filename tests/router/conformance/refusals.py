"""Calls that can't be served: refused without harm to what runs."""

from __future__ import annotations

import grpc
import pytest

from router.client import ShardClient, ShardError
from router.conformance.fixtures import ask, batch_of, cached, finish, tell


async def test_a_prefill_without_requests_is_refused(any_shard: ShardClient) -> None:
    with pytest.raises(ShardError) as caught:
        await any_shard.prefill(batch_of(1))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_refused_prefill_leaves_running_batches_alone(any_shard: ShardClient) -> None:
    alone = await tell(any_shard, ask(0, max_new_tokens=6))
    first = await any_shard.prefill(batch_of(0, ask(0, max_new_tokens=6)))
    with pytest.raises(ShardError):
        await any_shard.prefill(batch_of(1))
    await any_shard.clear_cache(1)
    stories = await finish(any_shard, await any_shard.decode([cached(first)]))
    assert list(first.of(0).tokens.ids) + stories[0].ids == alone.ids
