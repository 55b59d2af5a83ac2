"""Replies that kill a stock router, or quietly cheat it, kill the double at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.double import Router
from router.fake_sequence import Refused
from router.fake_shard import FakeShard
from router.startup import RouterPanic, RouterSettings
from router.streams import Prompt, Stream

SETTINGS = RouterSettings(max_input_tokens=40, max_total_tokens=80, max_batch_prefill_tokens=80)


def prompt(new: int) -> Prompt:
    return Prompt(text="hello", input_length=6, max_new_tokens=new, ignore_eos_token=True)


async def first_token(stream: Stream) -> None:
    async for _ in stream:
        return


Change = Callable[[Any], None]


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


def _twice(reply: Any) -> None:
    reply.generations.append(reply.generations[0])


def _silent(reply: Any) -> None:
    del reply.generations[:]


def _wrong_size(reply: Any) -> None:
    reply.batch.size += 1


def _forgotten(reply: Any) -> None:
    reply.ClearField("batch")


def _renamed(reply: Any) -> None:
    reply.batch.id = 5


def _shrunk(reply: Any) -> None:
    reply.batch.request_ids.pop()
    reply.batch.size -= 1


PANICS: list[tuple[Change, str]] = [
    (_no_tokens, "has no tokens"),
    (_zero_ids, "zero token ids"),
    (_short_logprobs, "unequal lengths"),
    (_unknown_request, "request id 99 not found"),
    (_unknown_reason, "finish reason 7"),
    (_twice, "two generations"),
    (_silent, "have no generation"),
    (_wrong_size, "has size 3 and 2 request ids"),
    (_forgotten, "no batch came back"),
    (_renamed, "batch 0 came back as 5"),
    (_shrunk, "came back with requests"),
]


@pytest.mark.parametrize("method", ["Prefill", "Decode"])
@pytest.mark.parametrize(
    ("change", "message"), PANICS, ids=lambda value: getattr(value, "__name__", value)
)
async def test_a_wrong_reply_panics_the_router(
    tmp_path: Path, method: str, change: Change, message: str
) -> None:
    def tamper(name: str, reply: Any) -> None:
        if name == method:
            change(reply)

    path = str(tmp_path / "shard-0")
    async with FakeShard(path, tamper=tamper):
        router = await Router.start(path, settings=SETTINGS)
        streams = [router.submit(prompt(6)), router.submit(prompt(6))]
        for stream in streams:
            with pytest.raises(RouterPanic, match=message):
                await stream.result()
        with pytest.raises(RouterPanic, match=message):
            await router.stop()


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


@pytest.mark.parametrize("method", ["FilterBatch", "ClearCache"])
async def test_an_error_where_none_may_be_panics_the_router(tmp_path: Path, method: str) -> None:
    armed = False

    def fail(name: str, reply: Any) -> None:
        if armed and name == method:
            raise Refused(grpc.StatusCode.INTERNAL, "no luck")

    path = str(tmp_path / "shard-0")
    async with FakeShard(path, tamper=fail):
        router = await Router.start(path, settings=SETTINGS)
        armed = True
        streams = [router.submit(prompt(30)) for _ in range(2)]
        await first_token(streams[1])
        streams[0].drop()
        if method == "ClearCache":
            streams[1].drop()
            await asyncio.wait([router._task])
        else:
            with pytest.raises(RouterPanic, match="no luck"):
                await streams[1].result()
        with pytest.raises(RouterPanic, match="no luck"):
            await router.stop()


async def test_a_filter_without_a_batch_is_noticed(tmp_path: Path) -> None:
    path = str(tmp_path / "shard-0")

    def forget(name: str, reply: Any) -> None:
        if name == "FilterBatch":
            reply.ClearField("batch")

    async with FakeShard(path, tamper=forget):
        router = await Router.start(path, settings=SETTINGS)
        router.submit(prompt(1))
        with pytest.raises(RouterPanic, match="returned no batch"):
            await router.generate(prompt(6))
        with pytest.raises(RouterPanic):
            await router.stop()
