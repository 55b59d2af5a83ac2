"""The router's book of blocks never loses or shares one by mistake."""

from __future__ import annotations

import random

from router.blocks import Allocation, BlockAllocator, round_up


def test_round_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


def test_a_prompts_whole_blocks_are_reused() -> None:
    allocator = BlockAllocator(64, 4, prefix_caching=True)
    first = allocator.allocate(12, tuple(range(10)))
    assert first is not None
    assert first.cache_len == 0
    allocator.release(first)
    second = allocator.allocate(12, (*range(8), 99))
    assert second is not None
    assert second.cache_len == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[1]


def test_one_token_is_always_left_to_compute() -> None:
    allocator = BlockAllocator(64, 4, prefix_caching=True)
    for expected in (0, 7):
        allocation = allocator.allocate(9, tuple(range(8)))
        assert allocation is not None
        assert allocation.cache_len == expected
        allocator.release(allocation)


def test_without_caching_nothing_is_shared() -> None:
    allocator = BlockAllocator(64, 4)
    for _ in range(2):
        allocation = allocator.allocate(9, tuple(range(8)))
        assert allocation is not None
        assert allocation.cache_len == 0
        allocator.release(allocation)


def test_cached_blocks_make_room() -> None:
    allocator = BlockAllocator(20, 4, prefix_caching=True)
    first = allocator.allocate(16, tuple(range(16)))
    assert first is not None
    assert allocator.allocate(1, (99,)) is None
    allocator.release(first)
    assert allocator.allocate(16, (99,)) is not None


def test_blocks_are_conserved_and_private_ones_never_shared() -> None:
    rng = random.Random(7)
    allocator = BlockAllocator(60, 3, prefix_caching=True)
    held: list[Allocation] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.randrange(len(held))))
        else:
            prompt = tuple(rng.choice((1, 2)) for _ in range(rng.randint(1, 9)))
            allocation = allocator.allocate(len(prompt) + rng.randint(0, 6), prompt)
            if allocation is not None:
                held.append(allocation)
        used = {block for each in held for block in each.blocks}
        private = [b for each in held for b in each.blocks[round_up(each.cache_len, 3) // 3 :]]
        assert len(private) == len(set(private))
        assert allocator.available + len(used) == allocator.size == 19


def test_block_0_is_kept_for_the_liveness_probe() -> None:
    allocation = BlockAllocator(64, 4).allocate(60, ())
    assert allocation is not None
    assert 0 not in allocation.blocks
    assert BlockAllocator(64, 4).allocate(61, ()) is None


def test_a_window_uses_its_slots_again() -> None:
    allocation = BlockAllocator(64, 4, window_size=6).allocate(10, ())
    assert allocation is not None
    assert len(allocation.blocks) == 2
    assert len(allocation.slots) == 10
    assert allocation.slots[8:] == allocation.slots[:2]


def test_a_book_of_prefixes_knows_no_window() -> None:
    allocator = BlockAllocator(64, 4, prefix_caching=True, window_size=6)
    allocation = allocator.allocate(10, (1, 2, 3, 4))
    assert allocation is not None
    assert len(set(allocation.slots)) == 10
