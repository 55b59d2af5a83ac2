"""The router's queue takes batches by TGI's rules."""

from __future__ import annotations

from typing import Any

import pytest

from router.queue import Entry, Queue
from router.records import Batch, ShardInfo
from router.startup import Limits
from router.streams import Prompt, Stream
from router.wire import V2, V3, Wire


def queue_of(
    *sizes: tuple[int, int], wire: Wire | None = None, capacity: int = 1000, **info: Any
) -> Queue:
    """A queue with an entry for each (input length, new tokens)."""
    facts: dict[str, Any] = {"requires_padding": False, "dtype": "", "device_type": ""}
    limits = Limits(max_input_tokens=500, max_total_tokens=1000, max_batch_total_tokens=capacity)
    queue = Queue(wire or V3(), ShardInfo(**(facts | {"block_size": 1} | info)), limits)
    for length, new in sizes:
        prompt = Prompt(text="x", input_length=length, max_new_tokens=new)
        queue.append(Entry(prompt, length, length, Stream(), new, new))
    return queue


def take(queue: Queue, **wanted: Any) -> Batch | None:
    defaults = {"min_size": None, "max_size": None, "prefill_budget": 500, "token_budget": 1000}
    taken = queue.next_batch(**(defaults | wanted))
    return None if taken is None else taken[1]


def ids(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [request.id for request in batch.requests]


def test_an_empty_queue_gives_nothing() -> None:
    assert take(queue_of()) is None


def test_batches_come_in_order_and_are_numbered_from_0() -> None:
    queue = queue_of((5, 1), (5, 1), (5, 1))
    first, second = take(queue, max_size=2), take(queue)
    assert (ids(first), ids(second)) == ([0, 1], [2])
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == (0, 1)


def test_max_tokens_is_prefill_and_decode() -> None:
    batch = take(queue_of((5, 1), (7, 20), requires_padding=True))
    assert batch is not None
    assert batch.max_tokens == 7 + 7 + 1 + 20


def test_v3_counts_only_whole_prompts_in_max_tokens() -> None:
    queue = queue_of((30, 9), (60, 9), support_chunking=True)
    whole = take(queue, max_size=1)
    chunk = take(queue, prefill_budget=40)
    assert whole is not None
    assert chunk is not None
    assert (whole.max_tokens, chunk.max_tokens) == (30, 0)


def test_the_first_that_does_not_fit_blocks_the_rest() -> None:
    queue = queue_of((50, 1), (60, 1), (5, 1))
    assert ids(take(queue, prefill_budget=100)) == [0]
    assert ids(take(queue, prefill_budget=100)) == [1, 2]


def test_fewer_than_min_size_are_put_back_in_order() -> None:
    queue = queue_of((50, 1), (40, 1), (60, 1), block_size=10)
    free = queue.allocator.available
    assert take(queue, min_size=4) is None
    assert take(queue, min_size=3, prefill_budget=100) is None
    assert queue.allocator.available == free
    assert ids(take(queue, min_size=2, prefill_budget=100)) == [0, 1]


@pytest.mark.parametrize("name", ["max_size", "prefill_budget", "token_budget"])
def test_a_budget_of_0_gives_nothing(name: str) -> None:
    assert take(queue_of((5, 1)), **{name: 0}) is None


def test_v2_knows_no_budget_of_0_but_a_full_batch() -> None:
    assert take(queue_of((5, 1), wire=V2()), max_size=0) is None
    assert ids(take(queue_of((16, 1), wire=V2(), block_size=16), token_budget=32)) == [0]


def test_v3_asks_blocks_and_not_the_token_budget() -> None:
    assert ids(take(queue_of((30, 9), (30, 9)), token_budget=1)) == [0, 1]


def test_an_adapter_and_a_grammar_are_sent() -> None:
    queue = queue_of()
    asked = Prompt(text="x", input_length=1, max_new_tokens=2, model="gpt-4", grammar="a+")
    queue.append(Entry(asked, 1, 1, Stream(), 2, 2))
    batch = take(queue)
    assert batch is not None
    (request,) = batch.requests
    assert request.adapter_id == "gpt-4"
    assert request.sampling.grammar == "a+"


def test_those_whose_receiver_is_gone_are_dropped() -> None:
    queue = queue_of((5, 1), (6, 1), (7, 1))
    for entry in list(queue._entries)[:2]:
        entry.stream.drop()
    assert ids(take(queue)) == [2]
    assert len(queue) == 0


def test_the_prefill_budget_is_rounded_up_to_blocks() -> None:
    assert ids(take(queue_of((30, 1), (34, 1), block_size=64), prefill_budget=40)) == [0, 1]
    assert ids(take(queue_of((30, 1), (34, 1), block_size=1), prefill_budget=40)) == [0]


def test_padding_counts_the_longest_prompt_for_each() -> None:
    queue = queue_of((10, 1), (40, 1), (10, 1), requires_padding=True)
    assert ids(take(queue, prefill_budget=119)) == [0, 1]
    queue = queue_of((10, 1), (40, 1), (10, 1), requires_padding=True)
    assert ids(take(queue, prefill_budget=120, token_budget=123)) == [0, 1, 2]
    queue = queue_of((10, 1), (40, 1), (10, 1), requires_padding=True)
    assert ids(take(queue, prefill_budget=120, token_budget=122)) == [0, 1]


def test_v2_rounds_each_request_to_blocks_of_16() -> None:
    queue = queue_of((17, 17), (1, 1), wire=V2(), block_size=16)
    batch = take(queue, prefill_budget=48, token_budget=96)
    assert ids(batch) == [0, 1]
    assert batch is not None
    assert batch.max_tokens == 32 + 16 + 32 + 16
    queue = queue_of((17, 17), (1, 1), wire=V2(), block_size=16)
    assert ids(take(queue, prefill_budget=48, token_budget=95)) == [0]


def test_v2_counts_no_new_tokens_beyond_the_window() -> None:
    queue = queue_of((16, 500), wire=V2(), block_size=16, window_size=32)
    batch = take(queue)
    assert batch is not None
    assert batch.max_tokens == 16 + 16


def test_v3_allocates_blocks_for_all_but_the_last_token() -> None:
    queue = queue_of((10, 7), block_size=8, capacity=64)
    batch = take(queue)
    assert batch is not None
    (request,) = batch.requests
    assert len(request.blocks) == batch.max_blocks == 2
    assert len(request.slots) == 16
    assert queue.allocator.available == 5


def test_v3_waits_for_free_blocks() -> None:
    queue = queue_of((10, 7), (10, 40), (1, 1), block_size=8, capacity=72)
    taken = queue.next_batch(min_size=None, max_size=None, prefill_budget=500, token_budget=1000)
    assert taken is not None
    entries, batch = taken
    assert ids(batch) == [0]
    queue.release(entries[0])
    assert ids(take(queue)) == [1, 2]


def test_chunking_fills_the_prefill_budget_with_part_of_a_prompt() -> None:
    queue = queue_of((30, 1), (30, 1), (1, 1), support_chunking=True)
    batch = take(queue, prefill_budget=40)
    assert batch is not None
    assert [request.chunk_len for request in batch.requests] == [None, 10]
    assert ids(take(queue)) == [2]


def test_chunking_never_sends_an_empty_chunk() -> None:
    queue = queue_of((30, 1), (30, 1), support_chunking=True)
    batch = take(queue, prefill_budget=30)
    assert batch is not None
    assert [request.chunk_len for request in batch.requests] == [None]
    assert ids(take(queue)) == [1]


def test_cached_beginnings_cost_no_prefill() -> None:
    queue = queue_of(block_size=4, use_prefix_caching=True, support_chunking=True)
    for last in (7, 8):
        prompt = Prompt(text="x", input_length=9, max_new_tokens=1, ids=(*range(8), last))
        queue.append(Entry(prompt, 9, 9, Stream(), 1, 1))
    taken = queue.next_batch(min_size=None, max_size=1, prefill_budget=12, token_budget=99)
    assert taken is not None
    queue.release(taken[0][0])
    batch = take(queue)
    assert batch is not None
    (request,) = batch.requests
    assert (request.cache_len, request.chunk_len) == (8, None)
    assert batch.max_tokens == 1
