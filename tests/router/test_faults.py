"""Replies that kill a stock router kill the double, those that cheat it quietly do so at once, and
a request that a shard forgets is said to be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.batching import Call
from router.double import Router
from router.fake_batches import Refused
from router.fake_shard import FakeShard
from router.faults import BrokenPromise, RequestLost, RouterPanic
from router.startup import RouterSettings
from router.streams import Prompt, Stream

SETTINGS = RouterSettings(max_input_tokens=40, max_total_tokens=80, max_batch_prefill_tokens=80)


def prompt(new: int) -> Prompt:
    return Prompt(text="hello", input_length=6, max_new_tokens=new, ignore_eos_token=True)


async def first_token(stream: Stream) -> None:
    async for _ in stream:
        return


Change = Callable[[Any], None]


@asynccontextmanager
async def driven(
    path: Path, method: str, change: Change, fault: type[AssertionError], **shard: Any
) -> AsyncIterator[Router]:
    """A router whose shard's replies to `method` are changed; stopping it raises `fault`."""

    def tamper(name: str, reply: Any) -> None:
        if name == method:
            change(reply)

    async with FakeShard(str(path / "shard-0"), tamper=tamper, **shard) as fake:
        router = await Router.start(fake.path, settings=SETTINGS)
        yield router
        with pytest.raises(fault):
            await router.stop()


def _no_tokens(reply: Any) -> None:
    reply.generations[0].ClearField("tokens")


def _zero_ids(reply: Any) -> None:
    reply.generations[0].tokens.Clear()
    reply.generations[0].tokens.SetInParent()


def _short_logprobs(reply: Any) -> None:
    del reply.generations[0].tokens.logprobs[:]


def _unknown_request(reply: Any) -> None:
    reply.generations[0].request_id = 99


def _unknown_reason(reply: Any) -> None:
    reply.generations[0].generated_text.finish_reason = 7


def _no_generated_tokens(reply: Any) -> None:
    reply.generations[0].generated_text.text = "x"


def _twice(reply: Any) -> None:
    reply.generations.append(reply.generations[0])


def _wrong_size(reply: Any) -> None:
    reply.batch.size += 1


def _renamed(reply: Any) -> None:
    reply.batch.id = 5


def _stranger(reply: Any) -> None:
    reply.batch.request_ids.append(99)
    reply.batch.size += 1


def _named_twice(reply: Any) -> None:
    reply.batch.request_ids.append(reply.batch.request_ids[0])
    reply.batch.size += 1


FAULTS: list[tuple[Change, type[AssertionError], str]] = [
    (_no_tokens, RouterPanic, "has no tokens"),
    (_zero_ids, RouterPanic, "zero token ids"),
    (_unknown_request, RouterPanic, "request id 99 not found"),
    (_unknown_reason, RouterPanic, "finish reason 7"),
    (_no_generated_tokens, RouterPanic, "ends with 0 generated_tokens"),
    (_short_logprobs, BrokenPromise, "ids, logprobs, texts and flags of lengths"),
    (_twice, BrokenPromise, "two generations"),
    (_wrong_size, BrokenPromise, "has size 3 and 2 request ids"),
    (_renamed, BrokenPromise, "batch 0 came back as 5"),
    (_stranger, BrokenPromise, "requests .99., which it does not hold"),
    (_named_twice, BrokenPromise, "requests .0., which it does not hold"),
]


@pytest.mark.parametrize("method", ["Prefill", "Decode"])
@pytest.mark.parametrize(
    ("change", "fault", "message"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
async def test_a_wrong_reply_ends_the_router(
    tmp_path: Path, method: str, change: Change, fault: type[AssertionError], message: str
) -> None:
    async with driven(tmp_path, method, change, fault) as router:
        streams = [router.submit(prompt(6)), router.submit(prompt(6))]
        for stream in streams:
            with pytest.raises(fault, match=message):
                await stream.result()


async def test_a_running_request_without_a_token_is_a_broken_promise(tmp_path: Path) -> None:
    def silent(reply: Any) -> None:
        del reply.generations[:]

    async with driven(tmp_path, "Decode", silent, BrokenPromise) as router:
        with pytest.raises(BrokenPromise, match="have no generation"):
            await router.generate(prompt(6))


async def test_a_generation_after_the_last_panics_the_router(tmp_path: Path) -> None:
    kept: list[Any] = []

    def tamper(name: str, reply: Any) -> None:
        if name == "Prefill":
            kept.append(reply.generations[0])
        if name == "Decode":
            reply.generations.append(kept[0])

    path = str(tmp_path / "shard-0")
    async with FakeShard(path, tamper=tamper):
        router = await Router.start(path, settings=SETTINGS)
        short, long = router.submit(prompt(1)), router.submit(prompt(6))
        assert len((await short.result()).ids) == 1
        with pytest.raises(RouterPanic, match="request id 0 not found"):
            await long.result()
        with pytest.raises(RouterPanic):
            await router.stop()


# --- what FilterBatch and ClearCache may not do -----------------------------------------------


@pytest.mark.parametrize("method", ["FilterBatch", "ClearCache"])
async def test_an_error_where_none_may_be_panics_the_router(tmp_path: Path, method: str) -> None:
    armed = False

    def fail(_: Any) -> None:
        if armed:
            raise Refused(grpc.StatusCode.INTERNAL, "no luck")

    async with driven(tmp_path, method, fail, RouterPanic) as router:
        armed = True
        streams = [router.submit(prompt(30)) for _ in range(2)]
        await first_token(streams[1])
        streams[0].drop()
        if method == "ClearCache":
            streams[1].drop()
            with pytest.raises(RouterPanic, match="ClearCache failed"):
                await router.idle()
        else:
            with pytest.raises(RouterPanic, match="FilterBatch failed"):
                await streams[1].result()


async def test_a_router_that_panicked_serves_nobody_and_looks_well(tmp_path: Path) -> None:
    async with driven(tmp_path, "Prefill", _no_tokens, RouterPanic) as router:
        with pytest.raises(RouterPanic):
            await router.generate(prompt(6))
        calls = list(router.calls)
        assert await router.health()
        with pytest.raises(RouterPanic):
            await router.generate(prompt(6))
        assert router.calls == calls


# --- lost requests ----------------------------------------------------------------------------


def _without(request_id: int) -> Change:
    def shrink(reply: Any) -> None:
        left = [each for each in reply.batch.request_ids if each != request_id]
        del reply.batch.request_ids[:]
        reply.batch.request_ids.extend(left)
        reply.batch.size = len(left)
        # Whoever is not named is not stepped, either.
        kept = [each for each in reply.generations if each.request_id != request_id]
        del reply.generations[:]
        reply.generations.extend(kept)

    return shrink


async def test_a_request_that_a_batch_does_not_name_is_lost(tmp_path: Path) -> None:
    async with driven(tmp_path, "Prefill", _without(0), RequestLost) as router:
        lost, stays = router.submit(prompt(6)), router.submit(prompt(6))
        with pytest.raises(RequestLost, match="request 0 is lost: batch 0 came back without it"):
            await lost.result()
        assert len((await stays.result()).ids) == 6
        # The router does not know: it goes on filtering, and keeps the request's blocks.
        assert router.calls.count(Call("FilterBatch", (0,), 1)) == 5
        assert [loss.request_id for loss in router.lost] == [0]


async def test_the_others_take_no_harm_from_a_lost_request(tmp_path: Path) -> None:
    async with driven(tmp_path, "Prefill", _without(0), RequestLost) as router:
        router.submit(prompt(6))
        assert len((await router.generate(prompt(6))).ids) == 6
        await router.idle()
        assert router.queue.allocator.available == router.queue.allocator.size
        assert len((await router.generate(prompt(3))).ids) == 3


@pytest.mark.parametrize("method", ["Prefill", "Decode"])
async def test_requests_are_lost_with_a_batch_that_does_not_come_back(
    tmp_path: Path, method: str
) -> None:
    def forget(reply: Any) -> None:
        reply.ClearField("batch")

    async with driven(tmp_path, method, forget, RequestLost) as router:
        streams = [router.submit(prompt(6)), router.submit(prompt(6))]
        for stream in streams:
            with pytest.raises(RequestLost, match="Incomplete generation"):
                await stream.result()


@pytest.mark.parametrize("support_chunking", [False, True])
async def test_newcomers_are_lost_with_a_prefill_that_forgets_them(
    tmp_path: Path, support_chunking: bool
) -> None:
    def forget(reply: Any) -> None:
        if any(generation.request_id == 1 for generation in reply.generations):
            reply.ClearField("batch")

    chunking = {"support_chunking": support_chunking}
    async with driven(tmp_path, "Prefill", forget, RequestLost, **chunking) as router:
        running = router.submit(prompt(30))
        await first_token(running)
        with pytest.raises(RequestLost, match="request 1"):
            await router.generate(prompt(6))
        if support_chunking:
            with pytest.raises(RequestLost, match="request 0"):
                await running.result()
        else:
            assert len((await running.result()).ids) == 30


async def test_a_filter_without_a_batch_ends_it_silently(tmp_path: Path) -> None:
    def forget(reply: Any) -> None:
        reply.ClearField("batch")

    async with driven(tmp_path, "FilterBatch", forget, RequestLost) as router:
        short, long = router.submit(prompt(1)), router.submit(prompt(6))
        assert len((await short.result()).ids) == 1
        with pytest.raises(RequestLost, match="Incomplete generation"):
            await long.result()
        await router.idle()
        assert router.calls[-1].method == "FilterBatch"
        # The next run of batches is not affected.
        assert len((await router.generate(prompt(3))).ids) == 3


# --- waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "name"), [("current_tokens", "current_tokens"), ("max_tokens", "max_tokens")]
)
async def test_a_batch_in_which_requests_wait_must_keep_joins_away(
    tmp_path: Path, field: str, name: str
) -> None:
    def modest(reply: Any) -> None:
        setattr(reply.batch, field, 1)

    async with driven(tmp_path, "Prefill", modest, BrokenPromise, rows=1) as router:
        streams = [router.submit(prompt(6)), router.submit(prompt(6))]
        for stream in streams:
            with pytest.raises(BrokenPromise, match=f"requests .1. wait in batch 0.*{name} 1 of"):
                await stream.result()


async def test_several_lost_requests_are_told_apart(tmp_path: Path) -> None:
    def forget(reply: Any) -> None:
        reply.ClearField("batch")

    async with driven(tmp_path, "Decode", forget, RequestLost) as router:
        streams = [router.submit(prompt(6)) for _ in range(3)]
        outcomes = await asyncio.gather(*(s.result() for s in streams), return_exceptions=True)
        assert [getattr(outcome, "request_id", None) for outcome in outcomes] == [0, 1, 2]
