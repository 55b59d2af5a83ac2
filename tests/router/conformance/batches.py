"""Batches in the shard: ids, joins, filters, and what CachedBatch says."""

from __future__ import annotations

import grpc
import pytest

from router.benchmark import Benchmark
from router.blocks import round_up
from router.client import ShardClient, ShardError
from router.conformance.fixtures import (
    PROMPTS,
    ask,
    assert_gone,
    batch_of,
    cached,
    finish,
    not_found,
    prompt_ids,
    tell,
)


async def test_prefill_brings_each_request_its_first_token(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(batch_of(5, ask(7), ask(3, PROMPTS[1])))
    assert sorted(each.request_id for each in reply.generations) == [3, 7]
    batch = cached(reply)
    assert (batch.id, batch.request_ids, batch.size) == (5, (7, 3), 2)


async def test_a_batch_is_absent_exactly_when_all_its_requests_stopped(
    any_shard: ShardClient,
) -> None:
    batch = cached(
        await any_shard.prefill(batch_of(0, ask(0, max_new_tokens=2), ask(1, max_new_tokens=3)))
    )
    second = await any_shard.decode([batch])
    assert second.of(0).generated_text is not None
    third = await any_shard.decode([cached(second)])
    assert third.of(1).generated_text is not None
    assert third.batch is None
    with not_found(0):
        await any_shard.decode([batch])


async def test_a_batch_that_ends_in_prefill_is_never_cached(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(batch_of(0, ask(0, max_new_tokens=1)))
    assert reply.batch is None
    assert reply.of(0).generated_text is not None


async def test_stopped_requests_stay_until_they_are_filtered(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(
        batch_of(0, ask(0, max_new_tokens=1), ask(1, PROMPTS[1], max_new_tokens=5))
    )
    for _ in range(2):
        batch = cached(reply)
        assert (batch.request_ids, batch.size) == ((0, 1), 2)
        reply = await any_shard.decode([batch])
        assert [each.request_id for each in reply.generations] == [1]
    filtered = await any_shard.filter_batch(0, [1])
    assert filtered is not None
    assert (filtered.id, filtered.request_ids, filtered.size) == (0, (1,), 1)


async def test_filter_drops_running_requests_and_the_rest_go_on(any_shard: ShardClient) -> None:
    alone = await tell(any_shard, ask(2, PROMPTS[2], max_new_tokens=5))
    first = await any_shard.prefill(
        batch_of(4, ask(1), ask(2, PROMPTS[2], max_new_tokens=5), ask(3, PROMPTS[1]))
    )
    filtered = await any_shard.filter_batch(4, [2])
    assert filtered is not None
    assert filtered.request_ids == (2,)
    stories = await finish(any_shard, await any_shard.decode([filtered]))
    assert list(stories) == [2]
    assert list(first.of(2).tokens.ids) + stories[2].ids == alone.ids


async def test_filter_that_keeps_all_changes_nothing(any_shard: ShardClient) -> None:
    batch = cached(await any_shard.prefill(batch_of(4, ask(1), ask(2))))
    assert await any_shard.filter_batch(4, [1, 2]) == batch


async def test_filter_keeps_a_batch_of_stopped_requests(any_shard: ShardClient) -> None:
    await any_shard.prefill(batch_of(4, ask(1, max_new_tokens=1), ask(2)))
    filtered = await any_shard.filter_batch(4, [1])
    assert filtered is not None
    assert filtered.request_ids == (1,)


async def test_an_unknown_batch_is_not_found_by_its_id(any_shard: ShardClient) -> None:
    gone = cached(await any_shard.prefill(batch_of(77, ask(0))))
    await any_shard.clear_cache(77)
    with not_found(77):
        await any_shard.decode([gone])


async def test_decode_of_no_batch_is_refused(any_shard: ShardClient) -> None:
    with pytest.raises(ShardError) as caught:
        await any_shard.decode([])
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Must provide at least one batch" in caught.value.message


async def test_prefill_overwrites_a_batch_with_the_same_id(any_shard: ShardClient) -> None:
    alone = await tell(any_shard, ask(9, PROMPTS[1]))
    await any_shard.prefill(batch_of(0, ask(0), ask(1)))
    reply = await any_shard.prefill(batch_of(0, ask(9, PROMPTS[1])))
    assert cached(reply).request_ids == (9,)
    assert (await finish(any_shard, reply))[9].ids == alone.ids


async def test_the_benchmark_runs_with_batch_id_0_for_ever(any_shard: ShardClient) -> None:
    benchmark = Benchmark(any_shard, size=3, sequence_length=5, decode_length=4)
    first = await benchmark.run()
    assert all(len(tokens) == 4 for tokens in first.values())
    for _ in range(3):
        await benchmark.prefill()
    assert await benchmark.run() == first


async def test_joined_batches_keep_the_first_ones_id_and_order(any_shard: ShardClient) -> None:
    first = cached(await any_shard.prefill(batch_of(8, ask(1), ask(0, PROMPTS[1]))))
    second = cached(await any_shard.prefill(batch_of(3, ask(2, PROMPTS[2]))))
    third = cached(await any_shard.prefill(batch_of(5, ask(4, PROMPTS[3]))))
    joined = cached(await any_shard.decode([first, second, third]))
    assert (joined.id, joined.request_ids, joined.size) == (8, (1, 0, 2, 4), 4)
    for gone in (3, 5):
        await assert_gone(any_shard, gone)


async def test_several_batches_decode_in_turns(any_shard: ShardClient) -> None:
    alone = [await tell(any_shard, ask(i, PROMPTS[i])) for i in range(3)]
    replies = [await any_shard.prefill(batch_of(i, ask(i, PROMPTS[i]))) for i in range(3)]
    for index in (2, 0, 1):
        story = (await finish(any_shard, replies[index]))[index]
        assert story.ids == alone[index].ids


async def test_max_tokens_is_what_the_batch_may_grow_to(shard: ShardClient) -> None:
    block = (await shard.info()).block_size
    bounds = {}
    for index, new in ((0, 3), (1, 6), (2, 9)):
        bounds[index] = len(await prompt_ids(shard, PROMPTS[index])) + new
    asked = [ask(i, PROMPTS[i], max_new_tokens=new) for i, new in ((0, 3), (1, 6), (2, 9))]

    def check(max_tokens: int, *ids: int) -> None:
        # The last token generated needs no room; a shard may count it or not.
        least = sum(round_up(bounds[i] - 1, block) for i in ids)
        assert least <= max_tokens <= sum(round_up(bounds[i], block) for i in ids)

    first = cached(await shard.prefill(batch_of(0, asked[0], asked[1])))
    check(first.max_tokens, 0, 1)
    second = cached(await shard.prefill(batch_of(1, asked[2])))
    check(second.max_tokens, 2)
    check(cached(await shard.decode([first, second])).max_tokens, 0, 1, 2)
    filtered = await shard.filter_batch(0, [1, 2])
    assert filtered is not None
    check(filtered.max_tokens, 1, 2)


async def test_current_tokens_is_one_a_running_request(shard: ShardClient) -> None:
    first = cached(await shard.prefill(batch_of(0, ask(0), ask(1, PROMPTS[1]))))
    assert first.current_tokens == 2
    second = cached(await shard.prefill(batch_of(1, ask(2))))
    assert cached(await shard.decode([first, second])).current_tokens == 3
    filtered = await shard.filter_batch(0, [0, 2])
    assert filtered is not None
    assert filtered.current_tokens == 2


async def test_steps_are_timed(any_shard: ShardClient) -> None:
    if any_shard.wire.name == "v1":
        pytest.skip("v1 has no timings")
    first = await any_shard.prefill(batch_of(0, ask(0)))
    second = await any_shard.prefill(batch_of(1, ask(1)))
    joined = await any_shard.decode([cached(first), cached(second)])
    single = await any_shard.decode([cached(joined)])
    for reply in (first, second, joined, single):
        assert reply.forward_ns > 0
        assert reply.decode_ns > 0
        assert reply.forward_ns + reply.decode_ns <= reply.total_ns
    assert first.concat_ns is None
    assert joined.concat_ns is not None
    assert single.concat_ns is None


async def test_ids_may_be_as_large_as_the_wire_allows(any_shard: ShardClient) -> None:
    largest = 2**64 - 1
    batch = cached(await any_shard.prefill(batch_of(largest, ask(largest), ask(0))))
    assert (batch.id, batch.request_ids) == (largest, (largest, 0))
    assert (await any_shard.decode([batch])).of(largest).tokens
