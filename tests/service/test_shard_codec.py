"""A router's step as a message of each wire generation."""

from __future__ import annotations

import math

import pytest
from wirefuzz import GENERATIONS

from tokenpod.service.dialects.tgi.codec import ShardCodec
from tokenpod.service.serving.calls import (
    CachedBatch,
    ShardGeneration,
    ShardStep,
    ShardText,
    TokenList,
)

CODECS = [ShardCodec(pb) for pb in GENERATIONS.values()]
#: What a router reads at most.
MOST_BYTES = 4 << 20


def generation(request_id: int, prompt: int) -> ShardGeneration:
    """One that reports the log probabilities of `prompt` prompt tokens."""
    ids = list(range(prompt))
    logprobs = [math.nan, *([-1.5] * (prompt - 1))]
    scored = TokenList(ids, logprobs, ["some text"] * prompt, [False] * prompt)
    return ShardGeneration(request_id, TokenList([5], [-0.5], ["x"], [False]), scored)


def step(*generations: ShardGeneration) -> ShardStep:
    batch = CachedBatch(1, [g.request_id for g in generations], 10, 10)
    return ShardStep(list(generations), batch, forward_ns=1, decode_ns=1, total_ns=2)


@pytest.mark.parametrize("codec", CODECS, ids=["v1", "v2", "v3"])
def test_an_answer_stays_readable_by_leaving_out_the_longest_prompts(codec: ShardCodec) -> None:
    longest, long, short = generation(1, 150_000), generation(2, 100_000), generation(3, 10)
    answer = codec.step(codec.pb.PrefillResponse(), step(short, longest, long))
    assert answer.ByteSize() < MOST_BYTES
    assert [g.request_id for g in answer.generations] == [3, 1, 2]
    assert [len(g.prefill_tokens.ids) for g in answer.generations] == [10, 0, 100_000]


@pytest.mark.parametrize("codec", CODECS, ids=["v1", "v2", "v3"])
def test_an_answer_that_is_not_too_long_is_whole(codec: ShardCodec) -> None:
    answer = codec.step(codec.pb.PrefillResponse(), step(generation(1, 50_000)))
    assert len(answer.generations[0].prefill_tokens.ids) == 50_000


@pytest.mark.parametrize("codec", CODECS, ids=["v1", "v2", "v3"])
def test_a_request_that_ended_alone_has_one_token_and_no_text(codec: ShardCodec) -> None:
    ended = ShardGeneration(
        7, TokenList([2], [0.0], [""], [True]), text=ShardText("", 1, 1, None, 0)
    )
    (message,) = codec.step(codec.pb.PrefillResponse(), step(ended)).generations
    assert message.generated_text.finish_reason == codec.pb.FINISH_REASON_EOS_TOKEN
    assert (message.generated_text.text, message.generated_text.generated_tokens) == ("", 1)
