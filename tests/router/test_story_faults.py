"""Stories on shards that break a promise: the report says which."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from router.driving import prompt
from router.fake_batches import Refused
from router.fake_shard import FakeShard
from router.outcomes import Ending, Event, Report
from router.records import LIVENESS_ID
from router.scripts import Act, Script, Visit
from router.startup import RouterSettings
from router.stories import play
from router.wire import V3

SETTINGS = RouterSettings(max_input_tokens=40, max_total_tokens=80, max_batch_prefill_tokens=80)


def burst(count: int, *, new: int = 4, **wanted: Any) -> Act:
    return Act(tuple(Visit(prompt(new)) for _ in range(count)), spread=0, **wanted)


async def story(
    path: Path,
    *acts: Act,
    interruptions: Callable[[FakeShard], dict[Event, Callable[[], Awaitable[bool]]]] | None = None,
    patience: float = 60.0,
    prepare: Callable[[FakeShard], object] = lambda _: None,
    **shard: Any,
) -> Report:
    async with FakeShard(str(path / "shard-0"), support_chunking=True, **shard) as fake:
        prepare(fake)
        return await play(
            fake.path,
            Script(0, V3(), SETTINGS, acts),
            interruptions=interruptions(fake) if interruptions else None,
            patience=patience,
        )


def faults(report: Report) -> str:
    return "\n".join(report.faults(lambda _: None))


def refusing(method: str, when: Callable[[Any], bool] = lambda _: True) -> Callable[..., None]:
    def tamper(name: str, reply: Any) -> None:
        if name == method and when(reply):
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no luck")

    return tamper


async def test_a_shard_without_faults_has_none(tmp_path: Path) -> None:
    report = await story(tmp_path, burst(20, probes=(3, 9)), burst(5), rows=2)
    assert faults(report) == ""
    assert report.counts() == {"finished": 25}


async def test_a_refused_burst_is_told(tmp_path: Path) -> None:
    tamper = refusing("Prefill", lambda reply: len(reply.generations) > 10)
    report = await story(tmp_path, burst(20), tamper=tamper)
    assert report.counts()["failed"] >= 11
    assert "failed: GenerationError: no luck" in faults(report)


async def test_a_forgotten_request_is_told(tmp_path: Path) -> None:
    def forget(name: str, reply: Any) -> None:
        if name == "Prefill" and 3 in reply.batch.request_ids:
            reply.batch.request_ids.remove(3)
            reply.batch.size -= 1

    report = await story(tmp_path, burst(5), tamper=forget)
    assert [each.error for each in report.outcomes if each.ending is Ending.LOST] == [
        "request 3 is lost: batch 0 came back without it, so its client hangs"
    ]


async def test_a_panic_is_told_and_everybody_in_it(tmp_path: Path) -> None:
    acts = (Act((Visit(prompt(2)), Visit(prompt(9))), spread=0), burst(3))
    report = await story(tmp_path, *acts, tamper=refusing("FilterBatch"))
    assert report.counts() == {"finished": 1, "LOST": 4}
    assert "the router died: RouterPanic: FilterBatch failed" in faults(report)


async def test_an_answer_that_never_comes_is_told(tmp_path: Path) -> None:
    report = await story(
        tmp_path, burst(2), rows=1, prepare=lambda fake: fake.rows.occupy(1), patience=0.2
    )
    assert "LOST: no answer within 0.2 s" in faults(report)


async def test_a_refused_probe_is_told(tmp_path: Path) -> None:
    def is_probe(reply: Any) -> bool:
        return [each.request_id for each in reply.generations] == [LIVENESS_ID]

    tamper = refusing("Prefill", is_probe)
    report = await story(tmp_path, burst(2, probes=(1,)), tamper=tamper)
    assert "a liveness Prefill failed" in faults(report)


async def test_a_request_that_a_drain_cuts_off_is_told(tmp_path: Path) -> None:
    def hasty(fake: FakeShard) -> dict[Event, Callable[[], Awaitable[bool]]]:
        async def drain() -> bool:
            await fake.drain(0)
            return False

        return {Event.DRAIN: drain}

    act = burst(2, new=60, event=Event.DRAIN, event_at=20)
    report = await story(tmp_path, act, interruptions=hasty)
    assert report.counts() == {"failed": 2}
    assert "failed: GenerationError: the server is draining" in faults(report)


async def test_a_kill_explains_itself(tmp_path: Path) -> None:
    def abrupt(fake: FakeShard) -> dict[Event, Callable[[], Awaitable[bool]]]:
        async def kill() -> bool:
            await fake.kill()
            return False

        return {Event.KILL: kill}

    act = burst(2, new=60, event=Event.KILL, event_at=20)
    report = await story(tmp_path, act, burst(3), interruptions=abrupt)
    assert report.counts() == {"failed": 2}
    assert faults(report) == ""


async def test_a_restarted_router_numbers_from_0_and_clears_first(tmp_path: Path) -> None:
    calls: list[tuple[str, tuple[int, ...]]] = []

    async with FakeShard(str(tmp_path / "shard-0"), support_chunking=True) as fake:
        acts = (burst(3, new=60, event=Event.RESTART, event_at=20), burst(2))
        report = await play(fake.path, Script(0, V3(), SETTINGS, acts))
        calls += fake.calls
        ids = [request.id for request in fake.requests]
    assert report.counts() == {"failed": 3, "finished": 2}
    assert faults(report) == ""
    assert ids == [0, 1, 2, 0, 1]
    second = [index for index, call in enumerate(calls) if call[0] == "Warmup"][1]
    assert calls[second - 1] == ("ClearCache", ())


@pytest.mark.parametrize("at", [0, 5])
async def test_a_client_that_hangs_up_has_left(tmp_path: Path, at: int) -> None:
    visits = (Visit(prompt(60), leaves_at=at), Visit(prompt(60), leaves_after=3), Visit(prompt(60)))
    report = await story(tmp_path, Act(visits, spread=0))
    assert report.counts() == {"hung up": 2, "finished": 1}
    assert {each.tokens for each in report.outcomes if each.tokens < 50} >= {3}


async def test_whoever_leaves_in_a_drain_is_followed(tmp_path: Path) -> None:
    def ample(fake: FakeShard) -> dict[Event, Callable[[], Awaitable[bool]]]:
        async def drain() -> bool:
            await fake.drain(60)
            return False

        return {Event.DRAIN: drain}

    followers = tuple(Visit(prompt(4)) for _ in range(7))
    act = burst(2, new=30, event=Event.DRAIN, event_at=20, followers=followers)
    report = await story(tmp_path, act, interruptions=ample)
    # The drain keeps them in the router's queue until nothing runs.
    assert report.counts() == {"finished": 2, "failed": 7}
    assert faults(report) == ""
