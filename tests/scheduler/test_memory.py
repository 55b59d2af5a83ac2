"""A scheduler that has served hundreds is as small as one that has served a few."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from support.engines.scheduler_driver import SECOND, request
from tokenpod.scheduler.scheduler import Limits, Scheduler


def serve(scheduler: Scheduler, chance: random.Random, first_id: int, requests: int) -> None:
    """Requests of every kind with deadlines an hour away, to their ends; then an empty cache."""
    now = 0
    texts = [[1] * 60, [1, 2] * 30, [2, 2, 1] * 20]
    for at in range(requests):
        ids = [first_id + 3 * at + each for each in range(chance.choice([1, 1, 3]))]
        prompt = [*chance.choice(texts)[: chance.randint(1, 50)], chance.randint(1, 9)]
        limits = {"deadline_at": 3600 * SECOND, "time_limit_at": 3600 * SECOND}
        scheduler.submit(request(ids, prompt, max_new_tokens=chance.randint(1, 8), **limits))
        if chance.random() < 0.2:
            scheduler.abort(ids[:1])
        while scheduler.load().waiting > 3 or (at == requests - 1 and scheduler.busy):
            now += 1
            step = scheduler.plan(now)
            assert step is not None
            wanted = len(step.sampled)
            tokens = [chance.choice((1, 2, 2, -1)) for _ in range(wanted)]
            scheduler.settle(step, tokens, now)
            scheduler.drain_events()
    scheduler.kv.evict(scheduler.kv.tree.evictable)
    scheduler.check()


def bytes_in_use() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_hundreds_of_requests_leave_nothing_behind():
    scheduler = Scheduler(Limits(slots=400, max_rows=8, max_positions=100, prefill_tokens=64))
    chance = random.Random(0)
    tracemalloc.start()
    try:
        serve(scheduler, chance, 0, 100)
        before = bytes_in_use()
        serve(scheduler, chance, 10_000, 250)
        grown = bytes_in_use() - before
    finally:
        tracemalloc.stop()
    # A small object a request would be more than this.
    assert grown < 16_000


@pytest.mark.parametrize("keep", ["upper", "lower"])
def test_half_of_a_split_run_does_not_keep_the_other_in_memory(keep):
    scheduler = Scheduler(Limits(slots=9000, max_rows=8, max_positions=9000, prefill_tokens=9000))
    tree = scheduler.kv.tree
    chance = random.Random(0)
    long = [chance.randint(0, 99) for _ in range(8000)]
    serve_one(scheduler, 1, long)
    serve_one(scheduler, 2, [*long[:10], 100])
    nodes = sorted(tree.nodes(), key=lambda node: len(node.tokens))
    node = nodes[-1] if keep == "lower" else next(n for n in nodes if len(n.tokens) == 10)
    assert node.tokens.base is None
    assert node.slots.base is None


def serve_one(scheduler: Scheduler, sequence_id: int, prompt: list[int]) -> None:
    scheduler.submit(request(sequence_id, prompt, max_new_tokens=1))
    while step := scheduler.plan(0):
        scheduler.settle(step, [1] * len(step.sampled), 0)
