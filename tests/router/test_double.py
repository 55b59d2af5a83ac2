"""The double batches and filters as a stock router does: its verdict can be trusted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router import fake_model as model
from router.batching import Call
from router.double import Router
from router.driving import SETTINGS, driven, first_token, greedy, prompt, text_of
from router.fake_shard import FakeShard
from router.faults import BrokenPromise
from router.records import FinishReason


async def test_a_request_is_one_prefill_and_decodes_to_its_end(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        result = await router.generate(prompt(3))
        assert result.ids == greedy("hello", 3)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.text == text_of(result.ids)
        await router.idle()
        assert router.calls == [Call("Prefill", (0,), 1)] + [Call("Decode", (0,), 1)] * 2
        assert fake.batches == {}


async def test_finished_requests_are_filtered_out(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, _):
        await asyncio.gather(router.generate(prompt(1)), router.generate(prompt(2)))
        assert router.calls == [
            Call("Prefill", (0,), 2),
            Call("FilterBatch", (0,), 1),
            Call("Decode", (0,), 1),
        ]


async def test_newcomers_are_joined_in_decode(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, _):
        running = router.submit(prompt(12))
        await first_token(running)
        late = await router.generate(prompt(2, "late"))
        assert late.ids == greedy("late", 2)
        assert Call("Decode", (0, 1), 2) in router.calls
        assert (await running.result()).ids == greedy("hello", 12)


async def test_newcomers_wait_for_the_ratio_but_not_for_ever(tmp_path: Path) -> None:
    settings = replace(SETTINGS, waiting_served_ratio=5.0, max_waiting_tokens=7)
    async with driven(tmp_path, settings=settings) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        await router.generate(prompt(2, "late"))
        second = next(i for i, call in enumerate(router.calls) if call.batch_ids == (1,))
        # waiting_tokens starts at 1 and grows with each Decode.
        assert router.calls[1:second] == [Call("Decode", (0,), 1)] * 6
        await running.result()


async def test_enough_newcomers_do_not_wait(tmp_path: Path) -> None:
    settings = replace(SETTINGS, waiting_served_ratio=3.0, max_waiting_tokens=1000)
    async with driven(tmp_path, settings=settings) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        streams = [router.submit(prompt(2)) for _ in range(3)]
        await asyncio.gather(*(stream.result() for stream in streams))
        assert Call("Prefill", (1,), 3) in router.calls
        await running.result()


async def test_max_batch_size_holds_newcomers_back(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_batch_size=2, waiting_served_ratio=0.0)
    async with driven(tmp_path, settings=settings) as (router, _):
        await asyncio.gather(*(router.generate(prompt(3 + i)) for i in range(5)))
        assert max(call.size for call in router.calls) == 2


async def test_with_chunking_newcomers_are_joined_in_prefill(tmp_path: Path) -> None:
    async with driven(tmp_path, support_chunking=True) as (router, _):
        running = router.submit(prompt(12))
        await first_token(running)
        assert (await router.generate(prompt(2, "late"))).ids == greedy("late", 2)
        assert Call("Prefill", (0, 1), 1) in router.calls
        assert all(len(call.batch_ids) == 1 for call in router.calls if call.method == "Decode")
        assert (await running.result()).ids == greedy("hello", 12)


async def test_a_prompt_over_the_prefill_budget_comes_in_pieces(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_batch_prefill_tokens=10)
    pieces: list[int] = []

    def watch(name: str, reply: Any) -> None:
        if name == "Prefill" and reply.batch.current_tokens > 1:
            pieces.append(reply.batch.current_tokens)

    async with driven(tmp_path, settings=settings, support_chunking=True, tamper=watch) as (
        router,
        _,
    ):
        text = "a longer prompt than ten"
        assert (await router.generate(prompt(3, text))).ids == greedy(text, 3)
        assert pieces == [len(text) + 1 - 10]


async def test_a_dropped_request_is_filtered_after_its_next_token(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        gone, stays = router.submit(prompt(30)), router.submit(prompt(30))
        await first_token(stays)
        gone.drop()
        assert (await stays.result()).ids == greedy("hello", 30)
        assert Call("FilterBatch", (0,), 1) in router.calls
        await router.idle()
        assert fake.batches == {}


async def test_a_batch_that_nobody_wants_is_cleared(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, fake):
        stream = router.submit(prompt(30))
        await first_token(stream)
        stream.drop()
        await router.idle()
        assert router.calls[-1] == Call("ClearCache", (0,))
        assert fake.batches == {}


async def test_a_request_dropped_in_the_queue_never_reaches_a_shard(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, _):
        router.submit(prompt(4)).drop()
        await router.generate(prompt(1))
        assert router.calls == [Call("Prefill", (0,), 1)]


async def test_two_shards_share_the_generations(tmp_path: Path) -> None:
    urls = tuple(f"unix://{tmp_path}/shard-{rank}" for rank in range(2))
    paths = [url.removeprefix("unix://") for url in urls]
    async with FakeShard(paths[0], urls=urls), FakeShard(paths[1], urls=urls, rank=1):
        router = await Router.start(paths[0], settings=SETTINGS)
        texts = ["one", "two", "three", "four"]
        results = await asyncio.gather(*(router.generate(prompt(5, text)) for text in texts))
        assert [result.ids for result in results] == [greedy(text, 5) for text in texts]
        await router.stop()


async def test_shards_that_both_answer_for_a_request_are_noticed(tmp_path: Path) -> None:
    urls = tuple(f"unix://{tmp_path}/shard-{rank}" for rank in range(2))
    paths = [url.removeprefix("unix://") for url in urls]
    async with FakeShard(paths[0], urls=urls), FakeShard(paths[1], urls=urls, rank=0):
        router = await Router.start(paths[0], settings=SETTINGS)
        with pytest.raises(BrokenPromise, match="two generations"):
            await router.generate(prompt(3))
        with pytest.raises(BrokenPromise):
            await router.stop()


async def test_the_end_token_finishes_a_request_unless_it_is_ignored(tmp_path: Path) -> None:
    texts = (f"text {i}" for i in range(1000))
    text = next(text for text in texts if model.EOS in greedy(text, 6)[:-1])
    at = greedy(text, 6).index(model.EOS)
    async with driven(tmp_path) as (router, _):
        ended = await router.generate(prompt(6, text, ignore_eos_token=False))
        assert ended.finish_reason is FinishReason.EOS_TOKEN
        assert ended.ids == greedy(text, 6)[: at + 1]
        assert ended.tokens[-1].is_special
        ignored = await router.generate(prompt(6, text))
        assert ignored.ids == greedy(text, 6)
        last = await router.generate(prompt(at + 1, text, ignore_eos_token=False))
        assert last.finish_reason is FinishReason.LENGTH
