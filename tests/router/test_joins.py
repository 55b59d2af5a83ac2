"""Which requests join a running batch, by the rules of each kind of router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.batching import Call
from router.driving import SETTINGS, driven, first_token, greedy, prompt
from router.wire import V2, V3, Wire


def saying(field: str, value: int) -> Callable[[str, Any], None]:
    """A tamper: every batch says this."""

    def tamper(name: str, reply: Any) -> None:
        if name in ("Prefill", "Decode") and reply.HasField("batch"):
            setattr(reply.batch, field, value)

    return tamper


# --- with chunking ----------------------------------------------------------------------------


async def test_max_batch_size_bounds_only_the_first_prefill_of_a_run(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_batch_size=2)
    async with driven(tmp_path, settings=settings, support_chunking=True) as (router, _):
        await asyncio.gather(*(router.generate(prompt(6)) for _ in range(7)))
        assert router.calls[:2] == [Call("Prefill", (0,), 2), Call("Prefill", (0, 1), 5)]


async def test_the_ratio_holds_nobody_back_with_chunking(tmp_path: Path) -> None:
    settings = replace(SETTINGS, waiting_served_ratio=100.0, max_waiting_tokens=1000)
    async with driven(tmp_path, settings=settings, support_chunking=True) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        await router.generate(prompt(2))
        assert not running.over


async def test_the_prefill_budget_is_less_what_the_batch_processes(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_batch_prefill_tokens=10)
    async with driven(tmp_path, settings=settings, support_chunking=True) as (router, fake):
        running = [router.submit(prompt(30, "a")) for _ in range(4)]
        await asyncio.gather(*map(first_token, running))
        late = [router.submit(prompt(6)) for _ in range(2)]
        results = await asyncio.gather(*(stream.result() for stream in late))
        assert [result.ids for result in results] == [greedy("hello", 6)] * 2
        # Four running requests leave 6 of 10 tokens, the first newcomer's; then five run.
        lengths = {each.id: each.chunk_len for each in fake.requests if each.HasField("chunk_len")}
        assert lengths == {5: 5}


@pytest.mark.parametrize("current", [80, 1000])
async def test_enough_current_tokens_keep_joins_away(tmp_path: Path, current: int) -> None:
    tamper = saying("current_tokens", current)
    async with driven(tmp_path, support_chunking=True, tamper=tamper) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        await router.generate(prompt(2))
        assert running.over
        assert Call("Prefill", (1,), 1) in router.calls


@pytest.mark.parametrize(("left", "joined"), [(1, True), (0, False)])
async def test_max_tokens_matters_only_where_it_leaves_nothing(
    tmp_path: Path, left: int, joined: bool
) -> None:
    tamper = saying("max_tokens", 20_000 - left)
    async with driven(tmp_path, support_chunking=True, tamper=tamper) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        await router.generate(prompt(2))
        assert (Call("Prefill", (0, 1), 1) in router.calls) is joined
        await running.result()


async def test_while_requests_wait_for_rows_no_others_are_sent(tmp_path: Path) -> None:
    async with driven(tmp_path, support_chunking=True, rows=2) as (router, _):
        crowd = [router.submit(prompt(4 + i)) for i in range(4)]
        await first_token(crowd[0])
        late = router.submit(prompt(2, "late"))
        results = [(await stream.result()).ids for stream in crowd]
        assert results == [greedy("hello", 4 + i) for i in range(4)]
        assert (await late.result()).ids == greedy("late", 2)
        sizes = [call for call in router.calls if call.method == "Prefill"]
        assert [call.size for call in sizes] == [4, 1]
        # Two of four requests had ended before the last two had a row each.
        assert router.calls.index(sizes[1]) > 4


# --- without ----------------------------------------------------------------------------------


async def test_v2_joins_within_the_token_budget(tmp_path: Path) -> None:
    async with driven(tmp_path, wire=V2(), capacity=96) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        small, large = router.submit(prompt(2)), router.submit(prompt(50))
        await small.result()
        assert not running.over
        await large.result()
        # 16 tokens of prompt and 64 new ones, by blocks of 16, do not fit beside 35.
        assert running.over
        assert Call("Decode", (0, 1), 2) in router.calls
        assert Call("Prefill", (2,), 1) in router.calls


async def test_v2_waits_for_the_ratio(tmp_path: Path) -> None:
    settings = replace(SETTINGS, waiting_served_ratio=2.0, max_waiting_tokens=5)
    async with driven(tmp_path, wire=V2(), settings=settings) as (router, _):
        running = router.submit(prompt(30))
        await first_token(running)
        await router.generate(prompt(2))
        second = next(i for i, call in enumerate(router.calls) if call.batch_ids == (1,))
        assert router.calls[1:second] == [Call("Decode", (0,), 1)] * 4
        await running.result()


@pytest.mark.parametrize("wire", [V2(), V3()], ids=str)
async def test_requests_that_wait_hold_a_batch_of_their_own(tmp_path: Path, wire: Wire) -> None:
    async with driven(tmp_path, wire=wire, rows=1) as (router, _):
        running = router.submit(prompt(6))
        await first_token(running)
        late = router.submit(prompt(3))
        assert (await running.result()).ids == greedy("hello", 6)
        assert (await late.result()).ids == greedy("hello", 3)


async def test_a_full_v2_batch_takes_nobody(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_batch_size=2, waiting_served_ratio=0.0)
    async with driven(tmp_path, wire=V2(), settings=settings) as (router, _):
        await asyncio.gather(*(router.generate(prompt(3 + i)) for i in range(6)))
        assert max(call.size for call in router.calls) == 2
