import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import examples
from tokenpod.scheduler.pool.slot_allocator import OutOfSlots, SlotAllocator


def runs(extents):
    return [(e.first, e.used) for e in extents]


def test_a_sequence_stays_one_run_while_its_room_lasts():
    allocator = SlotAllocator(100)
    (first,) = allocator.allocate(10, position=0, room=20)
    (second,) = allocator.allocate(10, position=0, room=20)
    for _ in range(20):
        assert allocator.grow(first, 1, 0) == []
    assert (first.used, first.room) == (30, 0)
    assert second.first >= first.end


def test_room_counts_as_free():
    allocator = SlotAllocator(100)
    allocator.allocate(10, position=0, room=90)
    assert allocator.free == 90


def test_the_smallest_run_with_room_is_taken():
    allocator = SlotAllocator(100)
    small, _, large, _ = (allocator.allocate(n, position=0, room=0)[0] for n in (10, 5, 30, 5))
    allocator.release(large)
    allocator.release(small)
    (extent,) = allocator.allocate(4, position=0, room=4)
    assert extent.first == 0


def test_the_largest_room_is_halved_when_there_is_no_run_left():
    allocator = SlotAllocator(100)
    (greedy,) = allocator.allocate(20, position=0, room=80)
    (other,) = allocator.allocate(30, position=0, room=0)
    assert greedy.room == 40
    assert other.first == 60


def test_slots_are_scattered_only_when_no_run_is_long_enough():
    allocator = SlotAllocator(30)
    parts = [allocator.allocate(5, position=0, room=0)[0] for _ in range(6)]
    for extent in parts[::2]:
        allocator.release(extent)
    extents = allocator.allocate(12, position=7, room=0)
    assert sum(e.used for e in extents) == 12
    assert len(extents) == 3
    assert [e.position for e in extents] == [7, 12, 17]


def test_freed_neighbours_merge():
    allocator = SlotAllocator(30)
    parts = [allocator.allocate(10, position=0, room=0)[0] for _ in range(3)]
    for extent in (parts[0], parts[2], parts[1]):
        allocator.release(extent)
    assert allocator.free_runs() == [(0, 30)]


def test_growth_continues_into_a_neighbour_that_was_freed():
    allocator = SlotAllocator(30)
    (first,) = allocator.allocate(10, position=0, room=0)
    (second,) = allocator.allocate(10, position=0, room=0)
    allocator.release(second)
    assert allocator.grow(first, 3, room=2) == []
    assert (first.used, first.room) == (13, 2)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.data())
def test_what_is_left_is_divided_among_many_and_no_slot_is_given_twice(lengths, data):
    allocator = SlotAllocator(sum(lengths) + 20)
    parts = [allocator.allocate(n, position=0, room=0)[0] for n in lengths]
    (greedy,) = allocator.allocate(1, position=0, room=data.draw(st.integers(0, 19)))
    released = data.draw(st.sets(st.sampled_from(range(len(parts)))))
    for at in released:
        allocator.release(parts[at])
    n = data.draw(st.integers(1, allocator.free))
    rooms = data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    free = allocator.free
    extents = allocator.allocate_each(np.arange(n) + 7, np.array(rooms))
    assert allocator.free == free - n
    assert [(e.position, e.used) for e in extents] == [(7 + i, 1) for i in range(n)]
    assert all(e.room <= room for e, room in zip(extents, rooms, strict=True))
    # Nobody has so much room that another could not have as much, but for where runs end.
    assert max(e.room for e in extents) <= free // n - 1
    others = [greedy, *(part for at, part in enumerate(parts) if at not in released), *extents]
    taken = [slot for e in others for slot in range(e.first, e.end)]
    free_now = [slot for at, count in allocator.free_runs() for slot in range(at, at + count)]
    assert sorted(taken + free_now) == list(range(allocator.total))
    for extent in others:
        allocator.release(extent)
    assert allocator.free_runs() == [(0, allocator.total)]


def test_an_allocation_for_many_is_whole_or_refused():
    allocator = SlotAllocator(10)
    allocator.allocate(8, position=0, room=2)
    with pytest.raises(OutOfSlots):
        allocator.allocate_each(np.zeros(3, np.int64), np.ones(3, np.int64))
    assert allocator.free == 2
    assert {e.first for e in allocator.allocate_each(np.zeros(2, np.int64), np.zeros(2))} == {8, 9}


def test_an_allocation_is_whole_or_refused():
    allocator = SlotAllocator(10)
    allocator.allocate(6, position=0, room=0)
    with pytest.raises(OutOfSlots, match="5 slots are wanted, 4 of 10 are free"):
        allocator.allocate(5, position=0, room=0)
    assert allocator.free == 4


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(st.data())
def test_no_slot_is_ever_lost_or_given_twice(data):
    total = data.draw(st.integers(1, 60))
    allocator = SlotAllocator(total)
    sequences = []
    for _ in range(40):
        action = data.draw(st.sampled_from(["new", "grow", "free"]))
        n = data.draw(st.integers(1, 12))
        if action == "new" and n <= allocator.free:
            room = data.draw(st.integers(0, 20))
            sequences.append(allocator.allocate(n, position=0, room=room))
        elif action == "grow" and sequences and n <= allocator.free:
            extents = data.draw(st.sampled_from(sequences))
            before = sum(e.used for e in extents)
            extents += allocator.grow(extents[-1], n, room=3)
            assert sum(e.used for e in extents) == before + n
        elif action == "free" and sequences:
            for extent in sequences.pop(data.draw(st.integers(0, len(sequences) - 1))):
                allocator.release(extent)
        owned = [s for es in sequences for e in es for s in range(e.first, e.end)]
        free = [s for first, n in allocator.free_runs() for s in range(first, first + n)]
        assert sorted(owned + free) == list(range(total))
        assert allocator.free == len(free)
