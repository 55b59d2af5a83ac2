"""Prompts in pieces: Prefill with chunk_len and with cached_batch. Skipped without chunking."""

from __future__ import annotations

import itertools

import pytest

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

_turns = itertools.count()


def unseen(prompt: str) -> str:
    """A prompt that no shard has cached: of one it has, a piece may be all that is missing."""
    return f"{next(_turns)} {prompt}"


@pytest.fixture
async def chunking_shard(shard: ShardClient) -> ShardClient:
    if not (await shard.info()).support_chunking:
        pytest.skip("the shard does not chunk")
    return shard


@pytest.mark.parametrize("chunk", [1, 2, 3])
async def test_an_incomplete_prompt_yields_no_generation(
    chunking_shard: ShardClient, chunk: int
) -> None:
    shard = chunking_shard
    length = len(await prompt_ids(shard, PROMPTS[0]))
    assert length > 3, "the tokenizer makes too little of the prompt for this test"
    prompt = unseen(PROMPTS[0])
    reply = await shard.prefill(batch_of(0, ask(0, prompt, chunk_len=chunk)))
    assert reply.generations == ()
    batch = cached(reply)
    assert (batch.request_ids, batch.size) == ((0,), 1)
    assert 1 <= batch.current_tokens <= len(await prompt_ids(shard, prompt)) - chunk


@pytest.mark.parametrize("chunk", [1, 2, 3])
async def test_chunks_do_not_change_the_tokens(chunking_shard: ShardClient, chunk: int) -> None:
    whole = await tell(chunking_shard, ask(0))
    assert (await tell(chunking_shard, ask(0, chunk_len=chunk))).ids == whole.ids


async def test_a_chunk_that_holds_the_whole_prompt_yields_its_token(
    chunking_shard: ShardClient,
) -> None:
    length = len(await prompt_ids(chunking_shard, PROMPTS[0]))
    reply = await chunking_shard.prefill(batch_of(0, ask(0, chunk_len=length)))
    assert reply.of(0).tokens


async def test_prefill_decodes_the_cached_batch_in_the_same_step(
    chunking_shard: ShardClient,
) -> None:
    shard = chunking_shard
    running = await tell(shard, ask(0, max_new_tokens=6))
    newcomer = await tell(shard, ask(1, PROMPTS[1]))
    first = await shard.prefill(batch_of(3, ask(0, max_new_tokens=6)))
    joined = await shard.prefill(batch_of(4, ask(1, PROMPTS[1])), cached(first))
    assert (cached(joined).id, cached(joined).request_ids) == (3, (0, 1))
    assert joined.concat_ns is not None
    stories = await finish(shard, joined)
    assert list(first.of(0).tokens.ids) + stories[0].ids == running.ids
    assert stories[1].ids == newcomer.ids


async def test_running_requests_go_on_while_a_prompt_comes_in_pieces(
    chunking_shard: ShardClient,
) -> None:
    shard = chunking_shard
    running = await tell(shard, ask(0, max_new_tokens=8))
    prompt = unseen(PROMPTS[2])
    first = await shard.prefill(batch_of(3, ask(0, max_new_tokens=8)))
    joined = await shard.prefill(batch_of(4, ask(1, prompt, chunk_len=2)), cached(first))
    assert [each.request_id for each in joined.generations] == [0]
    assert cached(joined).current_tokens >= 2
    stories = await finish(shard, joined)
    assert list(first.of(0).tokens.ids) + stories[0].ids == running.ids
    assert stories[1].ids == (await tell(shard, ask(1, prompt))).ids


async def test_a_prompt_in_pieces_can_be_filtered_out(chunking_shard: ShardClient) -> None:
    shard = chunking_shard
    kept, dropped = unseen(PROMPTS[0]), unseen(PROMPTS[1])
    pieces = ask(0, kept, chunk_len=1), ask(1, dropped, chunk_len=1)
    await shard.prefill(batch_of(3, *pieces))
    filtered = await shard.filter_batch(3, [0])
    assert filtered is not None
    stories = await finish(shard, await shard.decode([filtered]))
    assert list(stories) == [0]
    assert stories[0].ids == (await tell(shard, ask(0, kept))).ids


async def test_prefill_logprobs_of_a_prompt_in_pieces_are_whole(
    chunking_shard: ShardClient,
) -> None:
    whole = await tell(chunking_shard, ask(0, prefill_logprobs=True))
    pieces = await tell(chunking_shard, ask(0, prefill_logprobs=True, chunk_len=2))
    expected, given = (story.generations[0].prefill_tokens for story in (whole, pieces))
    assert expected is not None
    assert given is not None
    assert given.ids == expected.ids
    assert given.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)


async def test_an_unknown_cached_batch_is_not_found(chunking_shard: ShardClient) -> None:
    gone = cached(await chunking_shard.prefill(batch_of(3, ask(0))))
    await chunking_shard.clear_cache(3)
    with not_found(3):
        await chunking_shard.prefill(batch_of(4, ask(1)), gone)


async def test_a_failed_prefill_takes_the_cached_batch_with_it(
    chunking_shard: ShardClient,
) -> None:
    """Routers fail the running requests too, and never name their batch again."""
    first = cached(await chunking_shard.prefill(batch_of(3, ask(0))))
    with pytest.raises(ShardError):
        await chunking_shard.prefill(batch_of(4), first)
    await assert_gone(chunking_shard, 3)
