"""Clients that hang up: the router forgets them sooner than the shard can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from router.batching import Call
from router.double import Overloaded
from router.driving import SETTINGS, driven, first_token, greedy, prompt
from router.streams import HungUp


async def test_a_permit_is_free_as_soon_as_the_client_hangs_up(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_concurrent_requests=1)
    async with driven(tmp_path, settings=settings) as (router, fake):
        gone = router.submit(prompt(30))
        await first_token(gone)
        with pytest.raises(Overloaded):
            router.submit(prompt(2))
        gone.drop()
        stays = router.submit(prompt(2))
        assert [each.request.id for each in fake.batches[0]] == [0]
        assert (await stays.result()).ids == greedy("hello", 2)


async def test_too_many_requests_at_once_are_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_concurrent_requests=2)
    async with driven(tmp_path, settings=settings) as (router, _):
        streams = [router.submit(prompt(2)) for _ in range(2)]
        with pytest.raises(Overloaded):
            router.submit(prompt(2))
        for stream in streams:
            await stream.result()
        assert (await router.generate(prompt(1))).ids == greedy("hello", 1)


async def test_who_hung_up_stays_in_the_batch_until_its_next_generation(tmp_path: Path) -> None:
    async with driven(tmp_path, rows=1) as (router, _):
        running, gone = router.submit(prompt(6)), router.submit(prompt(30))
        await first_token(running)
        gone.drop()
        assert (await running.result()).ids == greedy("hello", 6)
        await router.idle()
        # The first token of the one that waited comes after the last of the other.
        assert router.calls == [
            Call("Prefill", (0,), 2),
            *[Call("Decode", (0,), 2)] * 5,
            Call("FilterBatch", (0,), 1),
            Call("Decode", (0,), 1),
            Call("ClearCache", (0,)),
        ]


async def test_the_blocks_of_who_hung_up_are_kept_until_then(tmp_path: Path) -> None:
    async with driven(tmp_path, rows=1) as (router, _):
        running, gone = router.submit(prompt(6)), router.submit(prompt(30))
        await first_token(running)
        gone.drop()
        book = router.queue.allocator
        assert book is not None
        assert book.size - book.available == 6 + 5 + 6 + 29
        await router.idle()
        assert book.available == book.size


async def test_reading_on_after_hanging_up_is_an_error(tmp_path: Path) -> None:
    async with driven(tmp_path) as (router, _):
        stream = router.submit(prompt(30))
        stream.drop()
        with pytest.raises(HungUp):
            await stream.result()
