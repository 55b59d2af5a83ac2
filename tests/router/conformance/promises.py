"""What a router relies on without a word in the protocol: no request fails its neighbours.

A router fails every running request when a Prefill or Decode fails, and dies when a FilterBatch or
ClearCache does. So what one request asks for never fails a call, and those two never fail.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.client import ShardClient
from router.conformance.fixtures import (
    PROMPTS,
    SMALL,
    Story,
    ask,
    assert_gone,
    batch_of,
    cached,
    finish,
    tell,
)
from router.records import (
    LIVENESS_ID,
    FinishReason,
    GrammarType,
    Image,
    Request,
    Sampling,
    StepReply,
)
from router.startup import WARMUP_IMAGE, WARMUP_MIMETYPE, warmup_batch

#: More than a shard has rows, in tests.
CROWD = 150


def assert_ended_alone(reply: StepReply, request_id: int) -> None:
    generation = reply.of(request_id)
    tokens, text = generation.tokens, generation.generated_text
    assert tokens is not None
    assert text is not None
    assert (len(tokens.ids), tokens.texts, tokens.logprobs) == (1, ("",), (0.0,))
    assert tokens.is_special == (True,)
    assert (text.text, text.generated_tokens) == ("", 1)
    assert text.finish_reason == FinishReason.EOS_TOKEN
    assert generation.prefill_tokens is None


UNSERVABLE: dict[str, dict[str, Any]] = {
    "grammar": {"sampling": Sampling(grammar="[a-z]+(?=x)", grammar_type=GrammarType.REGEX)},
    "too-long": {"max_new_tokens": 1_000_000},
    "no-tokens": {"max_new_tokens": 0},
    "no-text": {"inputs": "", "chunks": (), "add_special_tokens": False},
}


def unservable(name: str, request_id: int) -> Request:
    wanted = dict(UNSERVABLE[name])
    return ask(request_id, wanted.pop("inputs", PROMPTS[0]), **wanted)


@pytest.mark.parametrize("name", UNSERVABLE)
async def test_what_can_not_be_served_ends_alone(shard: ShardClient, name: str) -> None:
    alone = await tell(shard, ask(0, PROMPTS[1]))
    reply = await shard.prefill(batch_of(1, ask(0, PROMPTS[1]), unservable(name, 1)))
    assert_ended_alone(reply, 1)
    assert (cached(reply).request_ids, cached(reply).size) == ((0,), 1)
    assert (await finish(shard, reply))[0].ids == alone.ids


async def test_a_batch_of_nothing_that_can_be_served_is_never_cached(shard: ShardClient) -> None:
    reply = await shard.prefill(batch_of(1, unservable("grammar", 5), unservable("grammar", 6)))
    for request_id in (5, 6):
        assert_ended_alone(reply, request_id)
    assert reply.batch is None
    await assert_gone(shard, 1)


async def test_an_unknown_adapter_is_the_base_model(shard: ShardClient) -> None:
    alone = await tell(shard, ask(0))
    assert (await tell(shard, ask(0, adapter_id="gpt-4"))).ids == alone.ids


async def test_images_are_skipped(shard: ShardClient) -> None:
    alone = await tell(shard, ask(0, "ab"))
    image = Image(WARMUP_IMAGE, WARMUP_MIMETYPE)
    assert (await tell(shard, ask(0, chunks=("a", image, "b")))).ids == alone.ids


@pytest.mark.parametrize("keep", [[], [7, 8]], ids=["none", "strangers"])
async def test_a_filter_that_keeps_nothing_answers_without_a_batch(
    any_shard: ShardClient, keep: list[int]
) -> None:
    await any_shard.prefill(batch_of(4, ask(1, max_new_tokens=6), ask(2, max_new_tokens=6)))
    assert await any_shard.filter_batch(4, keep) is None
    await assert_gone(any_shard, 4)


async def test_a_filter_of_an_unknown_batch_answers_without_a_batch(
    any_shard: ShardClient,
) -> None:
    assert await any_shard.filter_batch(77, [0]) is None


async def test_a_failed_decode_releases_every_batch_that_it_named(any_shard: ShardClient) -> None:
    first = cached(await any_shard.prefill(batch_of(1, ask(0))))
    gone = cached(await any_shard.prefill(batch_of(2, ask(1))))
    await any_shard.clear_cache(2)
    with pytest.raises(Exception, match="Batch ID 2 not found"):
        await any_shard.decode([first, gone])
    await assert_gone(any_shard, 1)


# --- more requests than rows ------------------------------------------------------------------


async def warm(shard: ShardClient) -> int:
    """Warm up as a router does; the token budget."""
    sizes = (SMALL.max_input_tokens, SMALL.max_batch_prefill_tokens, SMALL.max_total_tokens)
    return (await shard.warmup(warmup_batch(shard.wire, SMALL), *sizes)).max_supported_total_tokens


def crowd() -> list[Request]:
    return [ask(i, PROMPTS[i % len(PROMPTS)], max_new_tokens=2 + i % 3) for i in range(CROWD)]


async def test_requests_beyond_the_rows_wait_and_keep_joins_away(any_shard: ShardClient) -> None:
    budget = await warm(any_shard)
    reply = await any_shard.prefill(batch_of(0, *crowd()))
    batch = cached(reply)
    assert 0 < len(reply.generations) < CROWD
    assert (batch.size, len(batch.request_ids)) == (CROWD, CROWD)
    assert batch.max_tokens >= budget
    if any_shard.wire.name == "v3":
        assert batch.current_tokens >= SMALL.max_batch_prefill_tokens


async def test_every_request_of_a_crowd_has_its_own_text(any_shard: ShardClient) -> None:
    alone = {text: (await tell(any_shard, ask(0, text))).ids for text in PROMPTS}
    asked = crowd()
    stories = await finish(any_shard, await any_shard.prefill(batch_of(0, *asked)))
    assert len(stories) == CROWD
    for request in asked:
        assert stories[request.id].ids == alone[request.inputs][: request.max_new_tokens]


async def test_a_batch_that_only_waits_is_answered_with_its_batch(any_shard: ShardClient) -> None:
    first = cached(await any_shard.prefill(batch_of(0, *crowd())))
    reply = await any_shard.prefill(batch_of(1, ask(1000), ask(1001)))
    assert reply.generations == ()
    assert cached(reply).request_ids == (1000, 1001)
    await any_shard.clear_cache(first.id)
    assert len((await any_shard.decode([cached(reply)])).generations) == 2


async def test_a_decode_that_can_step_nobody_waits_until_it_can(any_shard: ShardClient) -> None:
    first = cached(await any_shard.prefill(batch_of(0, *crowd())))
    waiting = cached(await any_shard.prefill(batch_of(1, ask(1000))))
    decode = asyncio.create_task(any_shard.decode([waiting]))
    await finish(any_shard, await any_shard.decode([first]))
    assert [each.request_id for each in (await decode).generations] == [1000]


async def test_requests_that_wait_can_be_filtered_out(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(batch_of(0, *crowd()))
    started = [each.request_id for each in reply.generations]
    waiting = [each for each in cached(reply).request_ids if each not in started]
    kept = await any_shard.filter_batch(0, waiting[:2])
    assert kept is not None
    stories: dict[int, Story] = await finish(any_shard, await any_shard.decode([kept]))
    assert sorted(stories) == sorted(waiting[:2])


async def test_the_liveness_probe_has_a_row_of_its_own(any_shard: ShardClient) -> None:
    await any_shard.prefill(batch_of(0, *crowd()))
    probe = ask(LIVENESS_ID, "liveness", truncate=1, max_new_tokens=1, blocks=(0,), slots=(0,))
    replies = await asyncio.gather(
        *(any_shard.prefill(batch_of(LIVENESS_ID, probe)) for _ in range(4))
    )
    assert all(reply.of(LIVENESS_ID).generated_text for reply in replies)
    assert all(reply.batch is None for reply in replies)
