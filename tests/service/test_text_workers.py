"""The pool of text workers: who is next, and what becomes of those who wait."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path

import pytest
from msgspec import structs

from support.pods.harness import children_of
from support.texts.chat_templates import turns
from support.texts.hostile import TEMPLATE
from support.waiting import until
from tokenpod.service.calls.chats import Tool
from tokenpod.service.calls.errors import InvalidArgument, Unavailable
from tokenpod.service.config.sources import ServerSettings
from tokenpod.service.text.parsers.turn import CALL_FORMATS
from tokenpod.service.text.tokenizers.tokenizer import TextModel, Tokenizer, TokenizerError
from tokenpod.service.text.workers.text_messages import (
    EncodeChat,
    EncodeTexts,
    Text,
    packed,
    unpacked,
)
from tokenpod.service.text.workers.text_worker import calls_constraint
from tokenpod.service.text.workers.text_workers import TextWorkers

pytestmark = pytest.mark.pod

DEMO = Tokenizer.load(Path(str(files("tokenpod.models.demo"))))
MODEL = TextModel(DEMO.text_model().tokenizer, TEMPLATE, {})
ENDLESS = EncodeChat(turns(("user", "loop")), 0)
SHORT = EncodeTexts([Text("a fox", True, 9)])


@asynccontextmanager
async def pool(seconds: float = 60.0, model: TextModel = MODEL) -> AsyncIterator[TextWorkers]:
    """One worker."""
    settings = ServerSettings(text_workers=1, text_timeout=seconds, text_memory_bytes=2**28)
    workers = await TextWorkers.start(model, settings)
    try:
        yield workers
    finally:
        await workers.close()


async def test_a_worker_encodes_as_the_front_end_does() -> None:
    text = "def f(x):\n    return {'a': x}  # 你好 😀"
    async with pool() as workers:
        encoded = await workers.run(
            EncodeTexts([Text(text, True, 99), Text(text, False, 3)]), field="text", size=1
        )
    plain = DEMO.encode(text, add_special_tokens=False)
    assert [unpacked(ids) for ids in encoded.ids] == [DEMO.encode(text), plain[-3:]]
    assert encoded.counts == [len(plain) + 1, len(plain)]


async def test_a_chat_comes_with_the_constraint_of_its_tools() -> None:
    schema = '{"type": "object", "properties": {"at": {"format": "date-time"}}}'
    chat = structs.replace(turns(("user", "hello")), tools=[Tool("f", "", schema)])
    (hermes,) = (each for each in CALL_FORMATS if each.name == "hermes")
    async with pool() as workers:
        plain = await workers.run(EncodeChat(chat, 9), field="chat", size=1)
        asked = await workers.run(EncodeChat(chat, 9, "hermes"), field="chat", size=1)
        assert (asked.ids, plain.calls) == (plain.ids, None)
        assert asked.calls == calls_constraint(chat, hermes, TEMPLATE)
        many = json.dumps({"anyOf": [{}] * 9000})
        chat = structs.replace(chat, tools=[Tool("f", "", many)])
        with pytest.raises(InvalidArgument, match=r"^chat.tools have more than 8192 schemas"):
            await workers.run(EncodeChat(chat, 9, "hermes"), field="chat", size=1)


async def test_the_smallest_is_next_and_now_and_then_the_oldest() -> None:
    done: list[int] = []

    async def run(workers: TextWorkers, size: int) -> None:
        await workers.run(SHORT, field="text", size=size)
        done.append(size)

    async with pool() as workers:
        first = asyncio.create_task(workers.run(SHORT, field="text", size=0))
        await asyncio.sleep(0)
        rest = [asyncio.create_task(run(workers, size)) for size in (9, 8, 7, 6, 5)]
        await asyncio.gather(first, *rest)
    # Every fourth is the oldest of those that wait.
    assert done == [5, 6, 7, 9, 8]


async def test_who_leaves_the_line_costs_the_others_nothing() -> None:
    async with pool() as workers:
        running = asyncio.create_task(workers.run(ENDLESS, field="chat", size=1))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(workers.run(SHORT, field="text", size=1)) for _ in "ab"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        running.cancel()
        assert (await waiting[1]).counts == [len(DEMO.encode("a fox"))]
        assert (await workers.run(SHORT, field="text", size=1)).counts


async def test_a_job_whose_time_is_over_names_the_limit_and_the_next_one_is_served() -> None:
    async with pool(seconds=1.0) as workers:
        with pytest.raises(InvalidArgument, match=r"chat takes .* more than 1 s"):
            await workers.run(ENDLESS, field="chat", size=1)
        assert (await workers.run(SHORT, field="text", size=1)).counts


def the_worker() -> int:
    """The process id of the only one."""
    # Servers of other files may be children as well.
    (pid,) = children_of(os.getpid(), running="tokenpod.service.text.workers.text_worker")
    return pid


async def test_the_end_of_an_idle_worker_costs_no_call() -> None:
    async with pool() as workers:
        for seconds in (0.0, 0.0, 0.5):
            os.kill(the_worker(), signal.SIGKILL)
            await asyncio.sleep(seconds)
            assert (await workers.run(SHORT, field="text", size=1)).counts


async def test_a_job_whose_worker_ends_is_done_by_another() -> None:
    async with pool() as workers:
        first = the_worker()
        # It takes the job, and can't begin.
        os.kill(first, signal.SIGSTOP)
        job = asyncio.create_task(workers.run(SHORT, field="text", size=1))
        await asyncio.sleep(0.1)
        os.kill(first, signal.SIGKILL)
        assert (await job).counts
        assert the_worker() != first


async def test_a_job_that_loses_two_workers_is_refused() -> None:
    async with pool() as workers:
        job = asyncio.create_task(workers.run(ENDLESS, field="chat", size=1))
        async with asyncio.timeout(60):
            for killed in range(2):
                await until(lambda: not workers._queue and not workers._idle)
                os.kill(the_worker(), signal.SIGKILL)
                await until(lambda last=killed: last or bool(workers._queue))
        with pytest.raises(Unavailable, match="was lost"):
            await job
        assert (await workers.run(SHORT, field="text", size=1)).counts


async def test_those_who_wait_at_the_end_are_told_so() -> None:
    async with pool() as workers:
        calls = [asyncio.create_task(workers.run(ENDLESS, field="chat", size=1)) for _ in "ab"]
        await asyncio.sleep(0)
        await workers.close()
        for call in calls:
            with pytest.raises(Unavailable):
                await call
        with pytest.raises(Unavailable):
            await workers.run(SHORT, field="text", size=1)


async def test_a_tokenizer_that_no_worker_can_load_is_named_at_the_start() -> None:
    with pytest.raises(TokenizerError, match="worker"):
        async with pool(model=TextModel(b"{}", None, {})):
            pass


def test_ids_travel_as_they_are() -> None:
    ids = [0, 1, 2**32 - 1]
    assert unpacked(packed(ids)) == ids
