"""Seeded stories of TGI's router on a real server: nobody is lost, and each text is as alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from router.outcomes import Event, Report
from router.scripts import Act, Script, Stage, Visit, parts, write
from router.startup import RouterSettings
from router.stories import lone_texts, play
from router.streams import OWN_MODEL, Prompt
from router.wire import V3
from support.pods.groups import ENV, FLAGS
from support.pods.harness import ServerProcess, serve

TEXTS = (
    "x = 1",
    "def add(a, b):\n    return",
    "import os\n" * 5,
    "for i in range(10):\n    pass\n" * 8,
)
PARTS = parts(TEXTS, (1, 3, 6, 12))
#: Few rows and a small cache, so that small stories fill both.
ROWS = ("--max-batch-size", "16", "--max-batch-total-tokens", "1024")


def stage(*events: Event) -> Stage:
    return Stage(
        parts=PARTS,
        max_input_tokens=160,
        max_total_tokens=200,
        prefill_tokens=(200, 400, 1024),
        events=events,
    )


class Pod:
    """A server at one socket, started again after it was drained or killed."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path = f"{folder}/shard-0"
        self._flags = (*FLAGS, *ROWS, "--uds-path", f"{folder}/shard", *flags)
        self._stack = contextlib.ExitStack()
        self._server: ServerProcess | None = None

    def ensure(self) -> None:
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = self._stack.enter_context(serve(*self._flags, env=ENV))

    def close(self) -> None:
        self._stack.close()

    async def drain(self) -> bool:
        return await self._end(signal.SIGTERM)

    async def kill(self) -> bool:
        return await self._end(signal.SIGKILL)

    async def _end(self, how: signal.Signals) -> bool:
        assert self._server is not None
        self._server.process.send_signal(how)
        await asyncio.to_thread(self._server.process.wait, 120)
        await asyncio.to_thread(self.ensure)
        return True


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    pod = Pod(tmp_path_factory.mktemp("pod"))
    yield pod
    pod.close()


@pytest.fixture(scope="module")
def alone(pod: Pod) -> dict[Prompt, str]:
    pod.ensure()
    return asyncio.run(lone_texts(pod.path, stage()))


async def told(pod: Pod, script: Script) -> Report:
    pod.ensure()
    interruptions = {Event.DRAIN: pod.drain, Event.KILL: pod.kill}
    return await play(pod.path, script, interruptions=interruptions)


def assert_nobody_lost(report: Report, alone: dict[Prompt, str]) -> None:
    faults = report.faults(lambda asked: alone[replace(asked, model=OWN_MODEL, grammar="")])
    assert faults == [], f"{report}; {len(faults)} faults, as {faults[:3]}"


def with_event(seed: int, event: Event) -> Script:
    """The first script from `seed` on in which it happens."""
    while True:
        script = write(seed, stage(event))
        if any(act.event is event for act in script.acts):
            return script
        seed += 1


@pytest.mark.parametrize("seed", range(2))
async def test_a_story_loses_nobody(pod: Pod, alone: dict[Prompt, str], seed: int) -> None:
    assert_nobody_lost(await told(pod, write(seed, stage(Event.RESTART))), alone)


@pytest.mark.parametrize("event", [Event.DRAIN, Event.KILL], ids=lambda event: event.value)
async def test_a_story_loses_only_what_ends_with_the_pod(
    pod: Pod, alone: dict[Prompt, str], event: Event
) -> None:
    assert_nobody_lost(await told(pod, with_event(100, event)), alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
async def test_a_hundred_stories_lose_nobody(pod: Pod, alone: dict[Prompt, str], seed: int) -> None:
    script = write(seed, stage(Event.RESTART, Event.DRAIN, Event.KILL))
    assert_nobody_lost(await told(pod, script), alone)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_a_drain_that_is_cut_short_kills_no_router(tmp_path: Path, seed: int) -> None:
    longest = Prompt(text="x = 1", input_length=0, max_new_tokens=190, ignore_eos_token=True)
    visits = tuple(
        Visit(replace(longest, max_new_tokens=new))
        for new in random.Random(seed).choices(range(20, 190), k=200)
    )
    act = Act(visits[:16], spread=0, event=Event.DRAIN, event_at=100, followers=visits[16:])
    settings = RouterSettings(
        max_input_tokens=160, max_total_tokens=200, max_batch_prefill_tokens=400
    )
    pod = Pod(tmp_path, "--graceful-termination-timeout", "1")
    with contextlib.closing(pod):
        report = await told(pod, Script(seed, V3(), settings, (act,)))
    assert report.panics == []
    assert report.counts()["LOST"] == 0
