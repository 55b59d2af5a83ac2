"""A router's step, run by the leader and joined by a follower: in whatever order the calls come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import pytest

from tokenpod.engine.types import Letter
from tokenpod.service import joining
from tokenpod.service.batches import Batches
from tokenpod.service.calls import (
    CachedBatch,
    PrefillCall,
    ShardBatch,
    ShardGeneration,
    ShardStep,
    TokenList,
)
from tokenpod.service.errors import NotFound, ServiceError, Unavailable
from tokenpod.service.joining import FollowerShard, LeaderShard
from tokenpod.service.letters import Letters


class Steps:
    """A shard whose steps end when a test says so."""

    def __init__(self) -> None:
        self.urls = ["here"]
        self.batches = Batches()
        self.end = asyncio.Event()
        self.end.set()
        self.error: Exception | None = None
        self.kept: list[tuple[int, list[int]]] = []
        self._steps = 0

    async def prefill(self, call: PrefillCall) -> ShardStep:
        return await self._step(call.batch.id)

    async def decode(self, batch_ids: list[int]) -> ShardStep:
        return await self._step(batch_ids[0])

    async def filter(self, batch_id: int, request_ids: list[int]) -> CachedBatch:
        self.kept.append((batch_id, request_ids))
        return CachedBatch(batch_id, request_ids, 10, 1)

    async def _step(self, batch_id: int) -> ShardStep:
        await self.end.wait()
        if self.error is not None:
            raise self.error
        self._steps += 1
        token = TokenList([1], [0.0], ["x"], [False])
        batch = CachedBatch(batch_id, [4, 5], 100, self._steps)
        return ShardStep([ShardGeneration(4, token)], batch, 1, 2, 3)


class Ferry:
    """Carries letters from one front end to the other, as ranks do."""

    def __init__(self, deliver: Callable[[Letter], None]) -> None:
        self._deliver = deliver

    def send(self, letter: Letter) -> None:
        asyncio.get_running_loop().call_soon(self._deliver, letter)


@dataclass
class Pods:
    steps: Steps
    leader: LeaderShard
    follower: FollowerShard
    letters: Letters
    left: asyncio.Event


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    theirs, ours = Letters(leads=True), Letters(leads=False)
    theirs.open(Ferry(ours.deliver))
    ours.open(Ferry(theirs.deliver))
    steps, left = Steps(), asyncio.Event()
    leader = LeaderShard(steps, make_way=left.wait)
    theirs.answering = leader.answer
    yield Pods(steps, leader, FollowerShard(ours, "pod-0:1", None), ours, left)
    ours.close()
    theirs.close()


def prefill(batch_id: int) -> PrefillCall:
    return PrefillCall(ShardBatch(batch_id, ()))


async def refusal(call: object) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        await call
    return refused.value


async def test_a_follower_has_the_leaders_batch_and_times_and_no_generation(pods: Pods) -> None:
    theirs, ours = await asyncio.gather(
        pods.leader.prefill(prefill(7)), pods.follower.prefill(prefill(7))
    )
    assert len(theirs.generations) == 1
    assert list(ours.generations) == []
    assert ours.batch == theirs.batch
    assert (ours.forward_ns, ours.decode_ns, ours.total_ns, ours.concat_ns) == (1, 2, 3, None)


async def test_whoever_is_called_first_both_see_the_same_step(pods: Pods) -> None:
    await pods.leader.prefill(prefill(7))
    assert (await pods.follower.prefill(prefill(7))).batch.current_tokens == 1
    waiting = asyncio.create_task(pods.follower.decode([7]))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert (await pods.leader.decode([7])).batch.current_tokens == 2
    assert (await waiting).batch.current_tokens == 2
    for count in (3, 4, 5):
        await pods.leader.decode([7])
        assert (await pods.follower.decode([7])).batch.current_tokens == count


async def test_a_step_under_way_is_waited_for(pods: Pods) -> None:
    pods.steps.end.clear()
    theirs = asyncio.create_task(pods.leader.decode([7]))
    ours = asyncio.create_task(pods.follower.decode([7]))
    await asyncio.sleep(0.02)
    assert not ours.done()
    pods.steps.end.set()
    assert (await ours).batch == (await theirs).batch


async def test_batches_do_not_mix(pods: Pods) -> None:
    await pods.leader.decode([7])
    ours = asyncio.create_task(pods.follower.decode([8]))
    await asyncio.sleep(0.02)
    assert not ours.done()
    await pods.leader.decode([8, 7])
    assert (await ours).batch.id == 8


async def test_a_prefill_that_replaces_a_batch_is_not_taken_for_its_last_step(pods: Pods) -> None:
    await pods.leader.prefill(prefill(0))
    await pods.follower.prefill(prefill(0))
    ours = asyncio.create_task(pods.follower.prefill(prefill(0)))
    await asyncio.sleep(0.02)
    assert not ours.done()
    await pods.leader.prefill(prefill(0))
    assert (await ours).batch.current_tokens == 2


async def test_what_fails_at_the_leader_fails_with_its_code_and_once(pods: Pods) -> None:
    pods.steps.error = NotFound("batch", "7", "Batch ID 7 not found in cache.")
    calls = [refusal(pods.leader.decode([7])), refusal(pods.follower.decode([7]))]
    for error in await asyncio.gather(*calls):
        assert error.code is grpc.StatusCode.NOT_FOUND
        assert error.message == "Batch ID 7 not found in cache."
    pods.steps.error = None
    theirs, ours = await asyncio.gather(pods.leader.decode([7]), pods.follower.decode([7]))
    assert ours.batch == theirs.batch


async def test_a_bug_at_the_leader_does_not_leave_followers_waiting(pods: Pods) -> None:
    pods.steps.error = ZeroDivisionError()
    ours = asyncio.create_task(refusal(pods.follower.decode([7])))
    with pytest.raises(ZeroDivisionError):
        await pods.leader.decode([7])
    assert (await ours).code is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_step_that_the_leader_is_never_asked_for_is_refused(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_BEGIN_SECONDS", 0.05)
    error = await refusal(pods.follower.decode([7]))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "batch 7" in error.message


async def test_a_step_that_a_draining_leader_refuses_is_refused_at_once(pods: Pods) -> None:
    pods.steps.error = Unavailable("the server is draining", retry_after=1.0)
    calls = [refusal(pods.leader.prefill(prefill(7))), refusal(pods.follower.prefill(prefill(7)))]
    for error in await asyncio.gather(*calls):
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert (error.message, error.retry_after) == ("the server is draining", 1.0)


async def test_a_pod_that_stops_waits_for_those_who_join_a_step(pods: Pods) -> None:
    began = time.monotonic()
    assert not pods.steps.batches.awaited(began)
    ours = asyncio.create_task(pods.follower.decode([7]))
    await asyncio.sleep(0.02)
    assert pods.steps.batches.awaited(began)
    await pods.leader.decode([7])
    assert (await ours).batch.id == 7


async def test_filtering_is_the_leaders_and_may_be_asked_twice(pods: Pods) -> None:
    theirs = await pods.leader.filter(7, [5])
    assert await pods.follower.filter(7, [5]) == theirs
    assert pods.steps.kept == [(7, [5]), (7, [5])]


async def test_leaving_waits_until_the_leader_has_made_way(pods: Pods) -> None:
    question = joining.pb.Question(leave=joining.pb.Leave())
    leave = asyncio.create_task(pods.letters.ask(question))
    await asyncio.sleep(0.02)
    assert not leave.done()
    pods.left.set()
    assert (await leave).HasField("may_leave")


async def test_a_group_that_ends_leaves_no_question_open(pods: Pods) -> None:
    ours = asyncio.create_task(refusal(pods.follower.decode([7])))
    await asyncio.sleep(0.02)
    pods.letters.close()
    assert isinstance(await ours, Unavailable)
    assert isinstance(await refusal(pods.follower.decode([7])), Unavailable)


async def test_a_leader_that_does_not_serve_yet_says_so() -> None:
    theirs, ours = Letters(leads=True), Letters(leads=False)
    assert isinstance(await refusal(FollowerShard(ours, "", None).decode([7])), Unavailable)
    theirs.open(Ferry(ours.deliver))
    ours.open(Ferry(theirs.deliver))
    error = await refusal(FollowerShard(ours, "", None).decode([7]))
    assert error.code is grpc.StatusCode.UNAVAILABLE


async def test_old_batches_are_forgotten(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_MOST_BATCHES", 3)
    for batch_id in range(9):
        await asyncio.gather(pods.leader.decode([batch_id]), pods.follower.decode([batch_id]))
    assert len(pods.leader._steps) == len(pods.follower._joined) == 3
