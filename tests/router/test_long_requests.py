"""A router sends a request again, as a fresh prompt, when its turn of new tokens is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from router.driving import SETTINGS, driven, first_token, greedy, prompt, text_of, tokenize
from router.records import FinishReason
from tokenpod_client.protos.generate.v3 import generate_pb2 as pb

SHORT_TURNS = replace(SETTINGS, generation_length=4)


async def test_the_rest_is_asked_for_with_the_text_so_far(tmp_path: Path) -> None:
    async with driven(tmp_path, settings=SHORT_TURNS, tokenizer=tokenize) as (router, fake):
        result = await router.generate(prompt(6))
        first, second = fake.requests
        assert first.inputs == "hello"
        assert second.inputs == "hello" + text_of(greedy("hello", 4))
        assert (first.id, second.id) == (0, 1)
        assert first.parameters.seed == second.parameters.seed
        assert result.ids == greedy("hello", 4) + greedy(second.inputs, 4)
        assert result.text == text_of(result.ids)
        assert result.finish_reason is FinishReason.LENGTH


async def test_a_turn_is_never_shortened(tmp_path: Path) -> None:
    async with driven(tmp_path, settings=SHORT_TURNS, tokenizer=tokenize) as (router, fake):
        result = await router.generate(prompt(6))
        assert [each.stopping_parameters.max_new_tokens for each in fake.requests] == [4, 4]
        # Two more than were asked for: so do routers.
        assert result.generated_tokens == len(result.ids) == 8


async def test_turns_may_bring_more_than_fits_beside_the_prompt(tmp_path: Path) -> None:
    """Each turn's prompt is a text, which may have fewer tokens than were generated for it."""

    def shorter(text: str) -> list[int]:
        ids = tokenize(text)
        return ids if text == "hello" else ids[:8]

    settings = replace(SHORT_TURNS, max_input_tokens=8, max_total_tokens=12)
    async with driven(tmp_path, settings=settings, tokenizer=shorter) as (router, fake):
        # Without a limit, beside a prompt of 6: no more than 6 would fit into 12.
        assert len((await router.generate(prompt(None))).ids) == 4 + 4
    async with driven(tmp_path, settings=settings, tokenizer=shorter) as (router, fake):
        # More than ever fit are served, in turns that each fit.
        assert len((await router.generate(prompt(30))).ids) == 32
        assert {each.stopping_parameters.max_new_tokens for each in fake.requests} == {4}


async def test_no_turn_follows_one_that_brings_enough(tmp_path: Path) -> None:
    async with driven(tmp_path, settings=SHORT_TURNS, tokenizer=tokenize) as (router, fake):
        assert len((await router.generate(prompt(4))).ids) == 4
        assert len(fake.requests) == 1


async def test_a_request_ends_where_its_text_is_too_long_for_a_prompt(tmp_path: Path) -> None:
    settings = replace(SHORT_TURNS, max_input_tokens=6)
    async with driven(tmp_path, settings=settings, tokenizer=tokenize) as (router, fake):
        result = await router.generate(prompt(20))
        assert result.ids == greedy("hello", 4)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(fake.requests) == 1


async def test_a_request_ends_where_its_text_leaves_no_room_for_a_turn(tmp_path: Path) -> None:
    settings = replace(SHORT_TURNS, max_input_tokens=11, max_total_tokens=12)
    async with driven(tmp_path, settings=settings, tokenizer=tokenize) as (router, fake):
        result = await router.generate(prompt(20))
        assert result.ids == greedy("hello", 4)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(fake.requests) == 1


async def test_without_a_limit_a_turn_takes_what_fits(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        await router.generate(prompt(None))
        (request,) = fake.requests
        assert request.stopping_parameters.max_new_tokens == 80 - 6


async def test_who_hangs_up_is_not_asked_for_again(tmp_path: Path) -> None:
    async with driven(tmp_path, settings=SHORT_TURNS, tokenizer=tokenize) as (router, fake):
        stream = router.submit(prompt(20))
        await first_token(stream)
        stream.drop()
        await router.idle()
        assert len(fake.requests) == 1


async def test_a_shard_that_ends_a_text_by_length_too_early_is_asked_again(tmp_path: Path) -> None:
    def early(name: str, reply: Any) -> None:
        if name == "Prefill":
            text = reply.generations[0].generated_text
            text.generated_tokens, text.finish_reason = 1, pb.FINISH_REASON_LENGTH
            reply.ClearField("batch")

    async with driven(tmp_path, tokenizer=tokenize, tamper=early) as (router, fake):
        assert len((await router.generate(prompt(3))).ids) == 3
        assert len(fake.requests) == 3
