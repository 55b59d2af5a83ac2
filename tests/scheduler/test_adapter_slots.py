"""Adapters share slots; what runs keeps its own."""

from __future__ import annotations

from support.engines.scheduler_driver import Driver, request
from tokenpod.core.outputs import FailureCode


def driver(slots: int = 2, known: int = 3, **more) -> Driver:
    return Driver(
        slots=200,
        max_rows=8,
        max_positions=60,
        prefill_tokens=40,
        adapter_slots=slots,
        adapters=frozenset(range(1, known + 1)),
        **more,
    )


def ask(driver: Driver, number: int, adapter: int, **more) -> None:
    driver.submit(request(number, [1, 2, 3], adapter=adapter, salt=str(adapter), **more))


def running(driver: Driver) -> set[int]:
    """Sequences that have a token."""
    return {i for i, s in driver.sequences.items() if s.tokens and not s.ended}


def turn(driver: Driver, n: int = 1) -> None:
    for _ in range(n):
        driver.now += 1
        driver.turn()


def test_a_request_waits_until_a_slot_is_idle():
    d = driver()
    for adapter in (1, 2, 3):
        ask(d, adapter, adapter, max_new_tokens=4 if adapter == 1 else 20)
    turn(d, 2)
    assert running(d) == {1, 2}
    turn(d, 5)
    assert running(d) == {2, 3}
    d.drain()


def test_the_slot_that_was_idle_longest_is_taken():
    d = driver()
    slots = d.scheduler.adapters
    for number, adapter in enumerate((1, 2, 1), start=1):
        ask(d, number, adapter, max_new_tokens=1)
        turn(d, 3)
    assert len(slots._slots) == 2
    ask(d, 4, 3, max_new_tokens=1)
    turn(d, 3)
    assert d.executor.adapters[2 if slots._slots[1] == 1 else 1] == 3
    # The first is there still: nothing is put for it.
    ask(d, 5, 1, max_new_tokens=1)
    turn(d)
    assert slots.take_puts() == []
    assert 1 in d.executor.adapters.values()
    d.drain()


def test_adapters_with_heads_are_in_the_first_slots_alone():
    """Others are there only while there are no other slots, and are waited for."""
    d = driver(3, 5, adapter_heads=1, whole_adapters=frozenset({4, 5}))
    for number, adapter in enumerate((1, 2, 4), start=1):
        ask(d, number, adapter, max_new_tokens=12 if adapter == 4 else 4)
    turn(d, 2)
    slots = d.scheduler.adapters
    assert running(d) == {1, 2, 3}
    assert slots._slots[4] == 1
    ask(d, 4, 5, max_new_tokens=3)
    ask(d, 5, 3, max_new_tokens=20)
    turn(d, 6)
    assert running(d) == {3}  # the other head waits, and who came behind it
    turn(d, 8)
    assert slots._slots[5] == 1
    turn(d, 4)
    for number, adapter in enumerate((1, 2), start=6):
        ask(d, number, adapter, max_new_tokens=20)
    turn(d, 2)
    assert sorted(slots._slots[each] for each in (1, 2, 3)) == [1, 2, 3]
    ask(d, 8, 4, max_new_tokens=2)
    turn(d, 2)
    assert 8 not in running(d)
    d.drain()


def test_a_retired_adapter_goes_with_its_last_sequence():
    d = driver()
    ask(d, 1, 1, max_new_tokens=4)
    turn(d)
    slots = d.scheduler.adapters
    slots.retire(1)
    assert slots.take_dropped() == []
    assert not slots.knows(1)
    d.scheduler.submit(request(2, [1, 2], adapter=1))
    (failure,) = d.scheduler.drain_events().failures
    assert (failure.sequence_id, failure.code) == (2, FailureCode.NOT_FOUND)
    turn(d, 6)
    assert slots.take_dropped() == [1]
    assert len(slots._slots) == 0
    d.drain()


def test_one_that_nobody_uses_goes_at_once():
    d = driver()
    d.scheduler.adapters.retire(2)
    assert d.scheduler.adapters.take_dropped() == [2]


def test_without_slots_an_adapter_is_refused():
    d = driver(slots=0)
    d.scheduler.submit(request(1, [1, 2], adapter=1))
    (failure,) = d.scheduler.drain_events().failures
    assert failure.code == FailureCode.INVALID_ARGUMENT
    assert "no slots" in failure.message
