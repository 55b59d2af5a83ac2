"""Requests that begin too late to end in time."""

from __future__ import annotations

from tokenpod.core.outputs import Failure, FailureCode
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.scheduler import Limits, Scheduler

SECOND = 1_000_000_000


def scheduler(prefill_tokens: int = 16) -> Scheduler:
    """One request runs at a time."""
    return Scheduler(
        Limits(slots=100, max_rows=2, max_positions=100, prefill_tokens=prefill_tokens)
    )


def request(*sequence_ids: int, prompt: int = 4, begin_by: int | None = SECOND) -> Request:
    """A request of 8 tokens that has to begin within its first second."""
    return Request(
        sequence_ids=list(sequence_ids),
        prompt=[1] * prompt,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=8),
        deadline_at=2 * SECOND,
        begin_by=begin_by,
    )


def failures(one: Scheduler, now: int) -> list[Failure]:
    """Of sequences, at a moment in which a step is planned."""
    one.plan(now)
    return one.drain_events().failures


def test_who_has_not_begun_by_then_is_dropped_with_all_samples() -> None:
    one = scheduler()
    one.submit(request(1, 2))
    one.submit(request(3, 4))
    assert not failures(one, 1)
    assert not failures(one, SECOND - 1)
    late = failures(one, SECOND)
    assert [failure.sequence_id for failure in late] == [3, 4]
    assert {failure.code for failure in late} == {FailureCode.DEADLINE_EXCEEDED}
    assert "can't be met any more: it is 1.000 s away" in late[0].message
    one.check()


def test_who_has_begun_goes_on_though_its_prompt_is_not_computed() -> None:
    one = scheduler(prefill_tokens=4)
    one.submit(request(1, 2, prompt=20))
    assert not failures(one, 1)
    assert not failures(one, SECOND)
    assert one.load().running == 2
    one.check()


def test_who_waits_without_such_a_moment_waits_for_its_deadline() -> None:
    one = scheduler()
    one.submit(request(1, 2))
    one.submit(request(3, begin_by=None))
    failures(one, 1)
    assert not failures(one, 2 * SECOND - 1)
    late = failures(one, 2 * SECOND)
    assert {failure.message for failure in late} == {"the deadline passed"}
    assert [failure.sequence_id for failure in late] == [1, 2, 3]
