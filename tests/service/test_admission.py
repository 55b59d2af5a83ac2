"""The bounded queue: what it takes in, what it refuses, and that every place is given back."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace

import pytest

from tokenpod.service.admission.admission import Admission, RequestStream
from tokenpod.service.calls.errors import ResourceExhausted, Unavailable


def admission(*, max_requests: int = 2, max_queue_tokens: int = 100) -> Admission:
    made = Admission(max_requests=max_requests, max_queue_tokens=max_queue_tokens)
    made.closed = None
    return made


def test_nothing_is_taken_in_before_the_model_is_loaded() -> None:
    starting = Admission(max_requests=1, max_queue_tokens=1)
    with pytest.raises(Unavailable, match="starting") as refused, starting.enter():
        pass
    assert refused.value.retry_after
    assert starting.counters.requests == 0


def test_one_request_too_many_is_refused_and_names_the_limit() -> None:
    pod = admission(max_requests=2)
    with pod.enter(), pod.enter():
        with pytest.raises(ResourceExhausted, match="at most 2") as refused, pod.enter():
            pass
        assert refused.value.limit == "max_concurrent_requests"
        assert refused.value.retry_after
        assert pod.counters.requests == 2
    with pod.enter():
        assert pod.counters.requests == 1


def test_a_queue_full_to_its_limit_takes_no_token_more() -> None:
    pod = admission(max_queue_tokens=100)
    with pod.enter() as first, pod.enter() as second:
        first.queue(60)
        with pytest.raises(ResourceExhausted, match="exceed 100") as refused:
            second.queue(41)
        assert refused.value.limit == "max_queue_tokens"
        second.queue(40)
        assert pod.counters.waiting_tokens == 100


def test_an_empty_queue_takes_a_prompt_longer_than_the_queue() -> None:
    pod = admission(max_queue_tokens=100)
    with pod.enter() as place:
        place.queue(500)
        assert pod.counters.waiting_tokens == 500


def test_a_computed_prompt_leaves_the_queue_once() -> None:
    pod = admission()
    with pod.enter() as place:
        place.queue(60)
        place.leave_queue()
        place.leave_queue()
        assert pod.counters.waiting_tokens == 0
        assert pod.counters.requests == 1
    assert (pod.counters.requests, pod.counters.waiting_tokens) == (0, 0)


def test_a_call_that_fails_gives_its_place_and_tokens_back() -> None:
    pod = admission()

    def fail() -> None:
        with pod.enter() as place:
            place.queue(60)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert (pod.counters.requests, pod.counters.waiting_tokens) == (0, 0)


def test_who_comes_while_it_is_closed_for_a_time_is_told_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.seconds, seconds=1000.0)
    monkeypatch.setattr("tokenpod.service.admission.admission.time", clock)
    pod = admission()
    pod.close("the group is forming", 9.0)
    assert retry_after(pod) == 9.0
    clock.seconds += 5.0
    assert retry_after(pod) == 4.0
    # It takes longer than was expected.
    clock.seconds += 5.0
    assert retry_after(pod) == 3.0
    pod.close("the group is forming", 900.0)
    assert retry_after(pod) == 30.0
    pod.drain()
    assert retry_after(pod) == 1.0


def retry_after(pod: Admission) -> float | None:
    with pytest.raises(Unavailable) as refused:
        pod.check_open()
    return refused.value.retry_after


async def test_the_requests_of_a_stream_hold_one_place() -> None:
    pod = admission(max_requests=2)
    stream = RequestStream()
    with pod.enter(stream=stream), pod.enter(stream=stream), pod.enter(stream=stream), pod.enter():
        assert pod.counters.requests == 2
        # Others are refused, and so is a stream that holds no place yet.
        for other in (None, RequestStream()):
            with pytest.raises(ResourceExhausted, match="at most 2"), pod.enter(stream=other):
                pass
    assert pod.counters.requests == 0
    pod.drain()
    with pytest.raises(Unavailable), pod.enter(stream=stream):
        pass


async def test_a_request_waits_for_what_others_of_its_stream_hold() -> None:
    pod, stream, answered = admission(max_queue_tokens=100), RequestStream(), list[int]()
    later = list[asyncio.Task[None]]()

    async def answer(number: int) -> None:
        with pod.enter(stream=stream) as place:
            place.queue(60)
            await asyncio.sleep(0.001)
            answered.append(number)
        if number < 5:  # it comes before those that wait
            one = functools.partial(answer, 5 + number)
            later.append(asyncio.ensure_future(stream.fitting(one)))

    ask = (stream.fitting(functools.partial(answer, number)) for number in range(5))
    await asyncio.wait_for(asyncio.gather(*ask), 10)
    await asyncio.gather(*later)
    assert sorted(answered) == [*range(10)]
    # What others hold is no reason to wait.
    with pod.enter() as other:
        other.queue(60)
        with pytest.raises(ResourceExhausted, match="exceed 100"):
            await stream.fitting(functools.partial(answer, 9))
