"""Fields whose feature the shard lacks: refused by name, never ignored, and without harm."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from router.client import ShardClient, ShardError
from router.conformance.fixtures import ask, batch_of, cached, finish, not_found, tell
from router.records import GrammarType, Image, Sampling
from router.startup import WARMUP_IMAGE, WARMUP_MIMETYPE

UNSUPPORTED = {
    "grammar": {"sampling": Sampling(grammar="[a-z]+", grammar_type=GrammarType.REGEX)},
    "adapter_id": {"adapter_id": "tiny"},
    "image": {"chunks": ("x", Image(WARMUP_IMAGE, WARMUP_MIMETYPE))},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_an_unsupported_field_is_refused_by_name(shard: ShardClient, name: str) -> None:
    wanted: dict[str, Any] = UNSUPPORTED[name]
    with pytest.raises(ShardError) as caught:
        await shard.prefill(batch_of(1, ask(0), ask(1, **wanted)))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert name in caught.value.message
    with not_found(1):
        await shard.filter_batch(1, [0])


async def test_a_refused_prefill_leaves_running_batches_alone(shard: ShardClient) -> None:
    alone = await tell(shard, ask(0, max_new_tokens=6))
    first = await shard.prefill(batch_of(0, ask(0, max_new_tokens=6)))
    with pytest.raises(ShardError):
        await shard.prefill(batch_of(1, ask(1, adapter_id="tiny")))
    await shard.clear_cache(1)
    stories = await finish(shard, await shard.decode([cached(first)]))
    assert list(first.of(0).tokens.ids) + stories[0].ids == alone.ids


async def test_a_prefill_without_requests_is_refused(any_shard: ShardClient) -> None:
    with pytest.raises(ShardError) as caught:
        await any_shard.prefill(batch_of(1))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
