"""TGI's shard protocol: in what its generations differ, and a router's step as their messages."""

from __future__ import annotations

import math

import pytest

from support.clients.wirefuzz import GENERATIONS
from tokenpod.service.calls.call import (
    AskedConstraint,
    CachedBatch,
    ConstraintKind,
    ShardGeneration,
    ShardStep,
    ShardText,
    TokenList,
)
from tokenpod.service.dialects.tgi.codec import ShardCodec

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


#: What TGI's protos say: the fields of an answer that came or went with a generation.
ONLY_IN = {
    "v1": {"token_id", "token_text", "generated_text.prompt_tokens"},
    "v2": {"tokens", "forward_ns", "total_ns"},
    "v3": {"tokens", "forward_ns", "total_ns", "batch.current_tokens"},
}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_an_answer_has_the_fields_that_its_generation_has(generation: str) -> None:
    codec = ShardCodec(GENERATIONS[generation])
    ended = ShardGeneration(
        7, TokenList([2], [0.0], ["a"], [True]), text=ShardText("a", 1, 1, None, 5)
    )
    answer = codec.step(codec.pb.PrefillResponse(), step(ended))
    (message,) = answer.generations
    parts = {"": message, "generated_text.": message.generated_text, "batch.": answer.batch}
    there = {f"{at}{field.name}" for at, part in parts.items() for field, _ in part.ListFields()}
    there |= {field.name for field, _ in answer.ListFields()}
    assert there & set().union(*ONLY_IN.values()) == ONLY_IN[generation]


async def test_what_a_generation_lacks_is_neutral() -> None:
    for codec in CODECS:
        asked = codec.pb.Request(id=1, inputs="x", stopping_parameters={"max_new_tokens": 3})
        batch, cached = await codec.prefill(codec.pb.PrefillRequest(batch={"requests": [asked]}))
        (request,) = batch.requests
        assert (request.inputs, request.max_new_tokens, cached) == ("x", 3, None)
        assert (request.frequency_penalty, request.constraint) == (0.0, None)
        assert (request.adapter_id, request.chunk_len) == (None, None)
        # Routers before v3 always want special tokens; v3's say so.
        assert request.add_special_tokens is (codec is not CODECS[2])


async def test_a_request_says_what_its_generation_can_say() -> None:
    third = CODECS[2].pb
    asked = third.Request(
        id=1,
        inputs="x",
        input_chunks={"chunks": [{"text": "a"}, {"text": "b"}]},
        adapter_id="acme",
        chunk_len=4,
        parameters={"frequency_penalty": 0.5, "grammar": "g", "grammar_type": 1},
    )
    joined = third.PrefillRequest(batch={"requests": [asked]}, cached_batch={"id": 9})
    batch, cached = await CODECS[2].prefill(joined)
    (request,) = batch.requests
    assert (request.inputs, request.adapter_id, request.chunk_len) == ("ab", "acme", 4)
    assert request.frequency_penalty == 0.5
    assert request.constraint == AskedConstraint(
        ConstraintKind.JSON_SCHEMA, "parameters.grammar", "g"
    )
    assert cached == 9


def test_a_warmup_says_its_limits_under_each_generations_names() -> None:
    first, second, third = CODECS
    assert first.warmup(first.pb.WarmupRequest()) == (None, None)
    limits = second.pb.WarmupRequest(max_input_length=10, max_total_tokens=20)
    assert second.warmup(limits) == (10, 20)
    assert second.warmup(second.pb.WarmupRequest()) == (None, None)
    limits = third.pb.WarmupRequest(max_input_tokens=10, max_total_tokens=0)
    assert third.warmup(limits) == (10, 0)
    assert [dict(codec.warmup_names) for codec in CODECS] == [
        {},
        {"max_input_tokens": "max_input_length"},
        {},
    ]
