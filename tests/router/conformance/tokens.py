"""What is generated: greedy and sampled tokens, texts, top tokens, and where it stops."""

from __future__ import annotations

import asyncio
import re

import pytest

from router.client import ShardClient
from router.conformance.fixtures import PROMPTS, Story, ask, batch_of, cached, finish, tell
from router.records import FinishReason, Sampling
from router.wire import WIRES

HOT = Sampling(do_sample=True, temperature=1.5, seed=1234)


async def test_all_generations_give_the_same_greedy_tokens(shard_address: str) -> None:
    stories = []
    for wire in WIRES:
        client = ShardClient(shard_address, wire)
        stories.append(await tell(client, ask(0, max_new_tokens=12)))
        await client.close()
    first, *others = stories
    for other in others:
        assert (other.ids, other.pieces, other.end) == (first.ids, first.pieces, first.end)


async def test_greedy_tokens_do_not_depend_on_the_batch(any_shard: ShardClient) -> None:
    asked = [ask(i, text, max_new_tokens=8 - i) for i, text in enumerate(PROMPTS)]
    alone = [(await tell(any_shard, each)).ids for each in asked]
    together = await finish(any_shard, await any_shard.prefill(batch_of(0, *asked)))
    assert [together[each.id].ids for each in asked] == alone
    first = await any_shard.prefill(batch_of(1, *asked[:2]))
    joined = await finish(
        any_shard,
        await any_shard.prefill(batch_of(2, *asked[2:])),
        [cached(first)],
    )
    assert [joined[each.id].ids for each in asked[2:]] == alone[2:]
    assert [list(first.of(i).tokens.ids) + joined[i].ids for i in (0, 1)] == alone[:2]


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(any_shard: ShardClient) -> None:
    asked = ask(0, max_new_tokens=8, sampling=HOT)
    alone = await tell(any_shard, asked)
    crowd = [
        ask(i, PROMPTS[i], max_new_tokens=6, sampling=Sampling(do_sample=True, seed=i))
        for i in range(1, 4)
    ]
    together = await finish(any_shard, await any_shard.prefill(batch_of(0, *crowd, asked)))
    assert together[0].ids == alone.ids


async def test_other_seeds_give_other_tokens(any_shard: ShardClient) -> None:
    stories = {
        tuple((await tell(any_shard, ask(0, max_new_tokens=12, sampling=sampling))).ids)
        for sampling in (Sampling(do_sample=True, temperature=2.0, seed=s) for s in range(4))
    }
    assert len(stories) > 1


async def test_the_seed_is_told_only_where_tokens_were_sampled(any_shard: ShardClient) -> None:
    largest = 2**64 - 1
    assert (await tell(any_shard, ask(0))).end.seed is None
    assert (await tell(any_shard, ask(0, sampling=HOT))).end.seed == 1234
    for sampling in (
        Sampling(do_sample=True, seed=largest),
        Sampling(temperature=0.5, seed=largest),
        Sampling(top_k=5, seed=largest),
        Sampling(top_p=0.5, seed=largest),
        Sampling(typical_p=0.5, seed=largest),
    ):
        assert (await tell(any_shard, ask(0, sampling=sampling))).end.seed == largest


async def test_a_step_brings_a_token_with_all_its_parts(any_shard: ShardClient) -> None:
    story = await tell(any_shard, ask(0, max_new_tokens=6))
    for generation in story.generations:
        tokens = generation.tokens
        assert tokens is not None
        assert len(tokens.ids) == len(tokens.logprobs) == len(tokens.texts) == 1
        assert len(tokens.is_special) == 1
        assert tokens.logprobs[0] <= 0
    assert [each.generated_text is None for each in story.generations] == [True] * 5 + [False]
    assert story.end.generated_tokens == 6
    assert story.end.finish_reason == FinishReason.LENGTH


def joined(pieces: list[str]) -> str:
    """The texts of tokens, less a character that was never completed."""
    return "".join(pieces).rstrip("\ufffd")


async def test_token_texts_add_up_to_the_generated_text(any_shard: ShardClient) -> None:
    checked = 0
    for text in PROMPTS:
        story = await tell(any_shard, ask(0, text, max_new_tokens=10))
        if not story.special:
            # The start of a character that the last token does not complete is never streamed.
            assert joined(story.pieces) == story.end.text.rstrip("\ufffd")
            checked += 1
    assert checked, "every story has special tokens, whose texts are not in the generated text"


@pytest.mark.parametrize("count", [1, 5, 20])
async def test_top_tokens_are_the_most_likely_and_all_ties(
    any_shard: ShardClient, count: int
) -> None:
    story = await tell(any_shard, ask(0, top_n_tokens=count))
    for generation in story.generations:
        (top,) = generation.top_tokens
        assert len(top.ids) == len(top.logprobs) == len(top.texts) == len(top.is_special) >= count
        assert len(set(top.ids)) == len(top.ids)
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        assert set(top.logprobs[count - 1 :]) == {top.logprobs[count - 1]}
        best = [i for i, p in zip(top.ids, top.logprobs, strict=True) if p == top.logprobs[0]]
        assert generation.tokens.ids[0] in best


async def test_no_tie_at_the_last_place_is_left_out(any_shard: ShardClient) -> None:
    few = await tell(any_shard, ask(0, max_new_tokens=8, top_n_tokens=3))
    many = await tell(any_shard, ask(0, max_new_tokens=8, top_n_tokens=20))
    for short, long in zip(few.generations, many.generations, strict=True):
        (top,), (all_,) = short.top_tokens, long.top_tokens
        ties = [i for i, p in zip(all_.ids, all_.logprobs, strict=True) if p >= all_.logprobs[2]]
        assert sorted(top.ids) == sorted(ties)


async def test_top_tokens_come_only_where_asked_for(any_shard: ShardClient) -> None:
    reply = await any_shard.prefill(batch_of(0, ask(0, top_n_tokens=2), ask(1)))
    assert reply.of(0).top_tokens
    assert not reply.of(1).top_tokens


async def test_neutral_zeros_are_greedy_too(any_shard: ShardClient) -> None:
    zeros = Sampling(temperature=0, top_p=0, typical_p=0, repetition_penalty=0)
    plain = await tell(any_shard, ask(0, max_new_tokens=8))
    assert (await tell(any_shard, ask(0, max_new_tokens=8, sampling=zeros))).ids == plain.ids


# --- where it stops ---------------------------------------------------------------------------


def stops_at(pieces: list[str], stop: str) -> int | None:
    """The index of the token with which TGI's rule stops: the text so far ends with `stop`."""
    text = ""
    for index, piece in enumerate(pieces):
        text += piece
        if re.search(re.escape(stop) + "$", text):
            return index
    return None


def likely_stop(pieces: list[str], *, within: bool) -> tuple[str, int | None] | None:
    """A stop string from the text itself and where it stops: two tokens' or part of a token."""
    for index in range(1, len(pieces) - 2):
        last = pieces[index]
        stop = pieces[index - 1] + (last[:-1] if within else last)
        usable = len(last) > 1 if within else last != ""
        at = stops_at(pieces, stop)
        if usable and stop.strip() and (at is None or not within) and at != len(pieces) - 1:
            return stop, at
    return None


async def story_with_stop(
    shard: ShardClient, *, within: bool
) -> tuple[str, Story, str, int | None]:
    for text in PROMPTS:
        story = await tell(shard, ask(0, text, max_new_tokens=16))
        found = None if story.special else likely_stop(story.pieces, within=within)
        if found is not None:
            return text, story, *found
    pytest.skip("the model's texts have no such stop string")


async def test_a_stop_sequence_ends_the_text_and_stays_in_it(any_shard: ShardClient) -> None:
    text, whole, stop, at = await story_with_stop(any_shard, within=False)
    assert at is not None
    story = await tell(
        any_shard, ask(0, text, max_new_tokens=16, stop_sequences=("\x00never", stop))
    )
    assert story.ids == whole.ids[: at + 1]
    assert story.end.finish_reason == FinishReason.STOP_SEQUENCE
    assert story.end.generated_tokens == at + 1
    assert story.end.text == "".join(whole.pieces[: at + 1])
    assert story.end.text.removesuffix("\n").endswith(stop) or story.end.text.endswith(stop)


async def test_a_stop_sequence_that_ends_within_a_token_is_missed(any_shard: ShardClient) -> None:
    text, whole, stop, at = await story_with_stop(any_shard, within=True)
    assert at is None
    story = await tell(any_shard, ask(0, text, max_new_tokens=16, stop_sequences=(stop,)))
    assert story.ids == whole.ids
    assert story.end.finish_reason == FinishReason.LENGTH


async def test_length_goes_before_a_stop_sequence(any_shard: ShardClient) -> None:
    text, _, stop, at = await story_with_stop(any_shard, within=False)
    assert at is not None
    for spare, reason in ((1, FinishReason.LENGTH), (2, FinishReason.STOP_SEQUENCE)):
        story = await tell(
            any_shard, ask(0, text, max_new_tokens=at + spare, stop_sequences=(stop,))
        )
        assert (story.end.finish_reason, len(story.ids)) == (reason, at + 1)


async def test_a_stop_sequence_ends_its_own_request_only(any_shard: ShardClient) -> None:
    text, whole, stop, at = await story_with_stop(any_shard, within=False)
    assert at is not None
    stopping = ask(0, text, max_new_tokens=16, stop_sequences=(stop,))
    going = ask(1, text, max_new_tokens=16)
    stories = await finish(any_shard, await any_shard.prefill(batch_of(0, stopping, going)))
    assert stories[0].ids == whole.ids[: at + 1]
    assert stories[1].ids == whole.ids


async def test_the_end_token_is_a_special_token_that_counts(any_shard: ShardClient) -> None:
    asked = [
        ask(
            i,
            max_new_tokens=24,
            ignore_eos_token=False,
            sampling=Sampling(do_sample=True, temperature=3.0, seed=i),
        )
        for i in range(16)
    ]
    stories = await finish(any_shard, await any_shard.prefill(batch_of(0, *asked)))
    ended = {
        i: story
        for i, story in stories.items()
        if story.end.finish_reason == FinishReason.EOS_TOKEN
    }
    if not ended:
        pytest.skip("no story came to its end")
    for index, story in ended.items():
        assert story.generations[-1].tokens.is_special == (True,)
        assert story.end.generated_tokens == len(story.ids)
        if not any(any(each.tokens.is_special) for each in story.generations[:-1]):
            assert joined(story.pieces[:-1]) == story.end.text.rstrip("\ufffd")
        short = ask(
            index,
            max_new_tokens=len(story.ids),
            sampling=asked[index].sampling,
            ignore_eos_token=False,
        )
        again = await tell(any_shard, short)
        assert again.ids == story.ids
        assert again.end.finish_reason == FinishReason.LENGTH


async def test_the_liveness_probe_disturbs_nothing(any_shard: ShardClient) -> None:
    largest = 2**64 - 1
    asked = ask(0, max_new_tokens=10)
    alone = await tell(any_shard, asked)

    async def probe() -> None:
        live = ask(
            largest,
            "liveness",
            truncate=1,
            max_new_tokens=1,
            ignore_eos_token=False,
            add_special_tokens=False,
            blocks=(0,),
            slots=(0,),
        )
        for _ in range(5):
            reply = await any_shard.prefill(batch_of(largest, live))
            assert reply.batch is None
            assert reply.of(largest).generated_text is not None

    story, _ = await asyncio.gather(tell(any_shard, asked, 0), probe())
    assert story.ids == alone.ids
