"""Seeded stories on the fake shard: the double and a shard that keeps its promises lose nobody."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.fake_shard import FakeShard
from router.outcomes import Event
from router.scripts import Stage, parts, write
from router.stories import lone_texts, play
from router.streams import OWN_MODEL, Prompt

TEXTS = ("a", "def add(a, b):", "The quick brown fox jumps over " * 2, "x = 1\n" * 18)
PARTS = parts(TEXTS, (1, 2, 3, 5, 9))
EVENTS = (Event.RESTART, Event.DRAIN, Event.KILL)
STAGE = Stage(
    parts=PARTS,
    max_input_tokens=128,
    max_total_tokens=160,
    prefill_tokens=(128, 300, 600),
    events=EVENTS,
)


class Pod:
    """A fake shard that can be drained and killed, and that may come back at the same socket."""

    def __init__(self, folder: Path, seed: int) -> None:
        rng = random.Random(f"pod {seed}")
        #: A link: the socket of a shard that is gone is removed at some later time.
        self.path = folder / "shard-0"
        self._folder = folder
        self._started = 0
        self._returns = rng.random() < 0.6
        self._wanted: dict[str, Any] = {
            "support_chunking": rng.random() < 0.7,
            "rows": rng.choice([3, 6, 12, 40]),
            "capacity": rng.choice([600, 600, 1500, 6000]),
            "max_total_tokens": STAGE.max_total_tokens,
        }

    async def __aenter__(self) -> Pod:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shard.kill()

    async def drain(self) -> bool:
        await self.shard.drain(60)
        return await self._again()

    async def kill(self) -> bool:
        await self.shard.kill()
        return await self._again()

    async def _again(self) -> bool:
        self.path.unlink()
        if self._returns:
            await self._start()
        return self._returns

    async def _start(self) -> None:
        self._started += 1
        socket = self._folder / f"socket-{self._started}"
        urls = (f"unix://{self.path}",)
        self.shard = await FakeShard(str(socket), urls=urls, **self._wanted).__aenter__()
        self.path.symlink_to(socket)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Prompt, str]:
    path = str(tmp_path_factory.mktemp("alone") / "shard-0")

    async def read() -> dict[Prompt, str]:
        async with FakeShard(path):
            return await lone_texts(path, STAGE)

    return asyncio.run(read())


@pytest.mark.sampled(10, "slow")
@pytest.mark.parametrize("seed", range(100))
async def test_a_story_loses_nobody(tmp_path: Path, alone: dict[Prompt, str], seed: int) -> None:
    async with Pod(tmp_path, seed) as pod:
        report = await play(
            str(pod.path),
            write(seed, STAGE),
            interruptions={Event.DRAIN: pod.drain, Event.KILL: pod.kill},
        )
    assert report.faults(lambda asked: alone[replace(asked, model=OWN_MODEL, grammar="")]) == []
