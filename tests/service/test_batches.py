"""How long a pod that is to stop waits for a router."""

from __future__ import annotations

import pytest

from tokenpod.service.batches import Batches
from tokenpod.service.errors import NotFound


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def batches(clock: Clock) -> Batches:
    return Batches(clock)


def test_without_any_batch_no_router_is_awaited(batches: Batches, clock: Clock) -> None:
    assert not batches.awaited(since=clock())


def test_a_router_that_rested_before_the_drain_gets_its_chance(
    batches: Batches, clock: Clock
) -> None:
    batches.put(7, [])
    clock.seconds += 60
    began = clock()
    assert batches.awaited(began)
    clock.seconds += 4.9
    assert batches.awaited(began)
    clock.seconds += 0.2
    assert not batches.awaited(began)


def test_each_call_shows_that_a_router_lives(batches: Batches, clock: Clock) -> None:
    batches.put(7, [])
    began = clock()
    for _ in range(5):
        clock.seconds += 4.9
        assert batches.awaited(began)
        with batches.call():
            batches.put(7, batches.take(7))
    clock.seconds += 5.1
    assert not batches.awaited(began)


def test_a_call_is_waited_for_however_long_it_takes_and_so_are_the_batches_that_rest(
    batches: Batches, clock: Clock
) -> None:
    batches.put(7, [])
    began = clock()
    with batches.call():
        clock.seconds += 60
        assert batches.awaited(began)
    assert batches.awaited(began)


def test_a_call_that_fails_is_over(batches: Batches, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), batches.call():
        raise ZeroDivisionError
    clock.seconds += 0.3
    assert not batches.awaited(since=clock())


def test_after_the_last_batch_a_call_may_be_late_by_a_moment(
    batches: Batches, clock: Clock
) -> None:
    began = clock()
    with batches.call():
        pass
    assert batches.awaited(began)
    clock.seconds += 0.3
    assert not batches.awaited(began)


def test_a_batch_is_found_once(batches: Batches) -> None:
    batches.put(7, [])
    assert (7 in batches, len(batches)) == (True, 1)
    assert batches.take(7) == []
    with pytest.raises(NotFound, match="Batch ID 7"):
        batches.take(7)


def test_what_is_discarded_is_gone_and_need_not_be_known(batches: Batches) -> None:
    batches.put(7, [])
    assert batches.discard(7) == batches.discard(7) == []
    batches.put(8, [])
    batches.discard_all()
    assert len(batches) == 0
