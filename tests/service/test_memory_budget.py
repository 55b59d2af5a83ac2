"""What calls take of the front ends' memory."""

from __future__ import annotations

import pytest

from tokenpod.service.admission.counters import PodCounters
from tokenpod.service.admission.memory_budget import MemoryBudget
from tokenpod.service.calls.errors import ResourceExhausted


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(PodCounters.create(1), 100)


def test_a_call_beyond_the_limit_is_refused_with_a_hint(budget: MemoryBudget) -> None:
    budget.reserve(60)
    with pytest.raises(ResourceExhausted) as refused:
        budget.reserve(41)
    assert "60" in str(refused.value)
    assert "--max-front-end-bytes" in str(refused.value)
    assert refused.value.retry_after
    assert budget.reserve(40).size == 40


def test_a_message_that_turns_out_small_makes_room(budget: MemoryBudget) -> None:
    lease = budget.reserve(90)
    lease.resize(10)
    assert budget.reserve(90).size == 90


def test_what_a_call_needs_later_is_counted_and_never_refused(budget: MemoryBudget) -> None:
    lease = budget.reserve(10)
    lease.resize(150)
    assert budget.taken == 150
    with pytest.raises(ResourceExhausted):
        budget.reserve(1)


def test_a_lease_is_given_back_once(budget: MemoryBudget) -> None:
    with budget.reserve(50) as lease:
        pass
    lease.release()
    lease.resize(70)
    assert budget.taken == 0


def test_where_nothing_is_counted_any_size_is_taken(budget: MemoryBudget) -> None:
    assert budget.reserve(1000).size == 1000


def test_the_limit_holds_for_all_front_ends_together() -> None:
    first = PodCounters.create(2)
    assert first.descriptor is not None
    second = PodCounters.join(first.descriptor, 1, 2)
    MemoryBudget(first, 100).reserve(60)
    with pytest.raises(ResourceExhausted):
        MemoryBudget(second, 100).reserve(60)


def test_what_a_lost_front_end_held_is_forgotten() -> None:
    first = PodCounters.create(2)
    assert first.descriptor is not None
    MemoryBudget(PodCounters.join(first.descriptor, 1, 2), 100).reserve(60)
    first.forget(1)
    assert MemoryBudget(first, 100).taken == 0


def test_with_all_of_the_memory_taken_no_message_is_read(budget: MemoryBudget) -> None:
    budget.check()
    lease = budget.reserve(99)
    budget.check()
    lease.resize(100)
    with pytest.raises(ResourceExhausted, match="--max-front-end-bytes"):
        budget.check()


def test_what_is_kept_does_not_refuse_the_only_call(budget: MemoryBudget) -> None:
    budget.keep(40)
    assert budget.taken == 0
    assert budget.reserve(1000).size == 1000


def test_what_is_kept_leaves_calls_less_until_it_is_given_back(budget: MemoryBudget) -> None:
    budget.keep(40)
    lease = budget.reserve(60)
    with pytest.raises(ResourceExhausted, match="has 60 for them"):
        budget.reserve(1)
    with pytest.raises(ResourceExhausted):
        budget.check()
    budget.give_back(40)
    assert budget.reserve(40).size == 40
    lease.release()


def test_no_more_than_half_is_kept(budget: MemoryBudget) -> None:
    budget.keep(30)
    with pytest.raises(ResourceExhausted, match="beside 30 others"):
        budget.keep(21)
    budget.keep(20)
