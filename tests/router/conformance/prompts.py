"""What the shard makes of a prompt: chunks, truncation, special tokens, prefill tokens."""

from __future__ import annotations

import math

import pytest

from router.client import ShardClient
from router.conformance.fixtures import PROMPTS, ask, batch_of, cached, prompt_ids, tell
from router.wire import V1, V2, Wire


async def test_truncate_keeps_the_last_tokens(shard: ShardClient) -> None:
    text = " ".join(PROMPTS)
    whole = await prompt_ids(shard, text, add_special_tokens=False)
    for length in (1, 3, len(whole)):
        cut = await prompt_ids(shard, text, add_special_tokens=False, truncate=length)
        assert cut == whole[-length:]


async def test_each_request_of_a_batch_has_its_own_truncation(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(
        batch_of(
            0,
            ask(0, PROMPTS[2], truncate=2, prefill_logprobs=True),
            ask(1, PROMPTS[2], truncate=4, prefill_logprobs=True),
        )
    )
    lengths = [len(reply.of(i).prefill_tokens.ids) for i in range(2)]
    assert lengths == [2, 4]


async def test_input_chunks_go_before_inputs(shard: ShardClient) -> None:
    expected = await prompt_ids(shard, PROMPTS[1])
    assert await prompt_ids(shard, "not this", chunks=(PROMPTS[1],)) == expected
    parts = (PROMPTS[1][:3], PROMPTS[1][3:])
    assert await prompt_ids(shard, "not this", chunks=parts) == expected


async def test_inputs_serve_where_there_are_no_chunks(shard: ShardClient) -> None:
    assert await prompt_ids(shard, PROMPTS[1], chunks=()) == await prompt_ids(shard, PROMPTS[1])


async def test_special_tokens_are_added_only_where_asked_for(shard: ShardClient) -> None:
    without = await prompt_ids(shard, PROMPTS[2], add_special_tokens=False)
    added = await prompt_ids(shard, PROMPTS[2], add_special_tokens=True)
    assert len(added) >= len(without)
    assert any(
        added[start : start + len(without)] == without
        for start in range(len(added) - len(without) + 1)
    )


async def test_without_special_tokens_prompts_begin_and_end_as_their_texts(
    shard: ShardClient,
) -> None:
    bare = [await prompt_ids(shard, text, add_special_tokens=False) for text in PROMPTS]
    assert len({ids[0] for ids in bare}) > 1
    assert len({ids[-1] for ids in bare}) > 1


@pytest.mark.parametrize("wire", [V1(), V2()], ids=str)
async def test_generations_before_v3_always_add_special_tokens(
    shard: ShardClient, shard_address: str, wire: Wire
) -> None:
    older = ShardClient(shard_address, wire)
    assert await prompt_ids(older, PROMPTS[2]) == await prompt_ids(shard, PROMPTS[2])
    await older.close()


async def test_prefill_tokens_come_once_and_begin_with_nan(any_shard: ShardClient) -> None:
    story = await tell(any_shard, ask(0, prefill_logprobs=True))
    first, *later = story.generations
    prefill = first.prefill_tokens
    assert prefill is not None
    assert len(prefill.ids) == len(prefill.logprobs) == len(prefill.texts) > 1
    assert len(prefill.is_special) in (0, len(prefill.ids))
    assert math.isnan(prefill.logprobs[0])
    assert all(each <= 0 for each in prefill.logprobs[1:])
    assert all(each.prefill_tokens is None for each in later)


async def test_prefill_tokens_come_only_where_asked_for(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(batch_of(0, ask(0, prefill_logprobs=True), ask(1)))
    assert reply.of(0).prefill_tokens is not None
    assert reply.of(1).prefill_tokens is None
    assert cached(reply).size == 2


async def test_asking_for_prefill_tokens_does_not_change_the_text(any_shard: ShardClient) -> None:
    plain = await tell(any_shard, ask(0))
    again = await tell(any_shard, ask(0, prefill_logprobs=True, top_n_tokens=3))
    assert again.ids == plain.ids
