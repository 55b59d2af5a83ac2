"""How long a batch stays without a call, and a pod that is to stop waits for its router."""

from __future__ import annotations

import asyncio

import pytest

from tokenpod.service.calls.errors import NotFound
from tokenpod.service.serving.batches import Batches


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


LEASE = 30.0


@pytest.fixture
def released() -> list[int]:
    """Batches whose lease has ended."""
    return []


@pytest.fixture
async def batches(clock: Clock, released: list[int]) -> Batches:
    # Timers run on the loop: it is where they are looked at by hand.
    return Batches(LEASE, lambda batch_id, _: released.append(batch_id), clock)


def look(batches: Batches) -> None:
    """What the timer does."""
    batches._look()


async def test_without_any_batch_no_router_is_awaited(batches: Batches, clock: Clock) -> None:
    assert not batches.awaited(since=clock())


async def test_a_router_that_rested_before_the_drain_gets_its_chance(
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


async def test_each_call_shows_that_a_router_lives(batches: Batches, clock: Clock) -> None:
    batches.put(7, [])
    began = clock()
    for _ in range(5):
        clock.seconds += 4.9
        assert batches.awaited(began)
        with batches.call():
            batches.put(7, batches.take(7))
    clock.seconds += 5.1
    assert not batches.awaited(began)


async def test_a_call_is_waited_for_however_long_it_takes_and_so_are_the_batches_that_rest(
    batches: Batches, clock: Clock
) -> None:
    batches.put(7, [])
    began = clock()
    with batches.call():
        clock.seconds += 60
        assert batches.awaited(began)
    assert batches.awaited(began)


async def test_a_call_that_fails_is_over(batches: Batches, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), batches.call():
        raise ZeroDivisionError
    clock.seconds += 0.3
    assert not batches.awaited(since=clock())


async def test_after_the_last_batch_no_router_is_awaited(batches: Batches, clock: Clock) -> None:
    began = clock()
    with batches.call():
        pass
    assert not batches.awaited(began)


async def test_a_batch_that_no_call_names_is_released(
    batches: Batches, clock: Clock, released: list[int]
) -> None:
    batches.put(7, [])
    clock.seconds += LEASE - 1
    batches.put(8, [])
    look(batches)
    assert released == []
    clock.seconds += 1
    look(batches)
    assert (released, 7 in batches, 8 in batches) == ([7], False, True)


async def test_a_call_renews_the_lease(batches: Batches, clock: Clock, released: list[int]) -> None:
    batches.put(7, [])
    for _ in range(3):
        clock.seconds += LEASE - 1
        look(batches)
        batches.put(7, batches.take(7))
    assert released == []


async def test_a_lease_does_not_run_while_a_prefill_does(
    batches: Batches, clock: Clock, released: list[int]
) -> None:
    batches.put(7, [])
    with batches.call(prefill=True):
        clock.seconds += 10 * LEASE
        look(batches)
    clock.seconds += LEASE - 1
    look(batches)
    assert released == []
    clock.seconds += 1
    look(batches)
    assert released == [7]


async def test_a_decode_of_other_batches_shows_that_its_router_has_given_one_up(
    batches: Batches, clock: Clock, released: list[int]
) -> None:
    batches.put(7, [])
    with batches.call():
        clock.seconds += LEASE
        look(batches)
    assert released == [7]


async def test_the_loop_looks_by_itself(released: list[int]) -> None:
    ended = asyncio.Event()
    batches = Batches(0.05, lambda *_: ended.set())
    batches.put(7, [])
    await asyncio.wait_for(ended.wait(), 10)
    assert 7 not in batches


async def test_whoever_waits_until_no_batch_is_here_hears_of_the_last(batches: Batches) -> None:
    batches.put(7, [])
    batches.put(8, [])
    emptied = asyncio.create_task(batches.emptied())
    batches.discard(7)
    await asyncio.sleep(0)
    assert not emptied.done()
    batches.discard(8)
    await asyncio.wait_for(emptied, 10)


async def test_a_batch_is_found_once(batches: Batches) -> None:
    batches.put(7, [])
    assert (7 in batches, len(batches)) == (True, 1)
    assert batches.take(7) == []
    with pytest.raises(NotFound, match="Batch ID 7"):
        batches.take(7)


async def test_what_is_discarded_is_gone_and_need_not_be_known(batches: Batches) -> None:
    batches.put(7, [])
    assert batches.discard(7) == batches.discard(7) == []
    batches.put(8, [])
    batches.discard_all()
    assert len(batches) == 0
