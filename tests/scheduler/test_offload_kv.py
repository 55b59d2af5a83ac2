"""The host's memory: what goes there, what comes back, and that nobody waits who need not."""

from __future__ import annotations

import random
from functools import partial

import pytest

from support.engines.scheduler_driver import Driver, Guesses, request
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.by_name import ADMISSIONS, batching

SWAP, RECOMPUTE = PREEMPTIONS["swap"](1), PREEMPTIONS["recompute"](1)


def driver_with(**options):
    shape = {
        "slots": 100,
        "max_rows": 8,
        "prefill_tokens": 8,
        "offload_slots": 400,
        "offload_block": 4,
    }
    return Driver(choose=lambda i, index: 1 + (i * 31 + index * 7) % 5, **(shape | options))


def cached(driver, *prompts, **options):
    """Serve these prompts, and have the pool forget all of them."""
    for i, prompt in enumerate(prompts, 1000 + len(driver.sequences)):
        driver.submit(request(i, prompt, **options))
    driver.run()
    driver.scheduler.kv.evict(driver.scheduler.kv.tree.tokens)
    assert driver.scheduler.kv.tree.tokens == 0


def test_an_evicted_prefix_comes_back():
    driver = driver_with()
    cached(driver, [9] * 30)
    driver.submit(request(3, [9] * 30))
    driver.turn()
    # Of its blocks of 4 tokens those that are whole; the last one went with outputs in it.
    assert driver.planned() == {3: 2}
    assert driver.executor.restored == driver.scheduler.load().fetched_tokens == 28
    driver.run()
    assert driver.scheduler.load().cached_tokens == 28
    driver.drain()


def test_a_block_is_whole_or_it_is_not_kept():
    driver = driver_with(offload_block=16)
    cached(driver, [9] * 30, max_new_tokens=1)
    driver.submit(request(3, [9] * 30, max_new_tokens=1))
    driver.turn()
    assert driver.executor.restored == 16
    driver.drain()


def test_what_is_shorter_than_the_least_is_computed():
    driver = driver_with(offload_least=30)
    cached(driver, [9] * 30)
    driver.submit(request(1, [9] * 30))
    driver.run()
    assert driver.executor.restored == 0
    driver.drain()


def test_prefixes_of_another_salt_are_not_found():
    driver = driver_with()
    cached(driver, [9] * 30, salt="a")
    driver.submit(request(1, [9] * 30, salt="b"))
    driver.run()
    driver.scheduler.kv.evict(driver.scheduler.kv.tree.tokens)
    assert driver.executor.restored == 0
    driver.submit(request(9, [9] * 30, salt="a"))
    driver.run()
    assert driver.executor.restored > 0
    driver.drain()


def test_nobody_waits_for_the_copies_of_another():
    driver = driver_with()
    cached(driver, [9] * 30)
    driver.submit(request(3, [7] * 4, max_new_tokens=30))
    driver.turn()
    driver.executor.chance.random = lambda: 1.0  # nothing arrives by itself
    driver.submit(request(4, [9] * 30))
    for _ in range(5):
        driver.turn()
        assert driver.planned() == {3: 1}
        assert not len(driver.last_step.plan.awaited)
    driver.executor.chance.random = lambda: 0.0
    driver.executor.chance.randint = lambda low, high: 0
    driver.turn()
    assert driver.planned() == {3: 1}
    driver.turn()
    assert driver.planned() == {3: 1, 4: 2}
    assert driver.last_step.plan.awaited.tolist() == [6]  # steps ago
    driver.drain()


def test_a_routers_prompt_comes_back_too_and_waits_for_its_copies_as_for_a_row():
    driver = driver_with()
    cached(driver, [9] * 30, [8] * 20)
    driver.advance(1, [request(1, [9] * 30, max_new_tokens=9)])
    driver.turn()
    assert driver.planned() == {1: 2}
    driver.executor.chance.random = lambda: 1.0  # nothing arrives by itself
    driver.advance(2, [request(2, [8] * 20)], resume=[1])
    driver.turn()
    assert driver.planned() == {1: 1}
    assert driver.waiting[2] == [2]
    driver.advance(3, resume=[2])
    driver.turn()
    assert driver.planned() == {2: 1}
    assert driver.executor.restored == 28 + 19
    driver.drain()


def test_an_aborted_request_keeps_its_slots_until_its_copies_have_arrived():
    driver = driver_with()
    cached(driver, [9] * 30)
    driver.executor.chance.random = lambda: 1.0
    driver.submit(request(3, [7] * 4, max_new_tokens=30))
    driver.turn()
    driver.submit(request(4, [9] * 30))
    driver.turn()
    before = driver.scheduler.kv.available
    driver.abort(4)
    driver.turn()
    assert driver.scheduler.kv.available == before - 1
    driver.drain()


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_computes_nothing_again(caching):
    driver = driver_with(preemption=SWAP, prefix_caching=caching, slots=60)
    driver.submit(request(1, [9] * 21, max_new_tokens=12))
    for _ in range(6):
        driver.turn()
    had = len(driver.outputs(1))
    assert driver.preempt(1) == [1]
    load = driver.scheduler.load()
    assert (load.swapped, load.waiting, load.running) == (1, 0, 0)
    assert load.swapped_tokens == 21 + had - 1
    # Another one takes its place in the pool, which has forgotten it then.
    driver.scheduler.kv.flush()
    driver.turn()
    assert driver.planned() == {1: 1}
    assert driver.scheduler.load().swapped == 0
    driver.drain()
    assert len(driver.outputs(1)) == 12


def test_what_finds_no_room_there_is_computed_again():
    driver = driver_with(preemption=SWAP, offload_slots=16)
    driver.submit(request(1, [9] * 21, max_new_tokens=12))
    for _ in range(6):
        driver.turn()
    driver.preempt(1)
    load = driver.scheduler.load()
    assert (load.swapped, load.swapped_tokens, load.waiting) == (0, 0, 1)
    driver.drain()
    assert len(driver.outputs(1)) == 12


def test_what_is_swapped_is_not_forgotten_for_prefixes():
    driver = driver_with(preemption=SWAP, offload_slots=40, slots=60, max_rows=1)
    driver.submit(request(1, [9] * 21, max_new_tokens=12))
    for _ in range(6):
        driver.turn()
    driver.submit(request(2, [8] * 40, priority=1))
    driver.preempt(1)
    for i in range(3, 8):
        driver.submit(request(i, [i] * 50, priority=1))
    while not all(driver.sequences[i].ended for i in range(2, 8)):
        assert driver.scheduler.load().swapped == 1
        driver.turn()
    driver.turn()
    assert driver.planned() == {1: 1}
    driver.drain()


def test_by_vllms_rule_several_samples_are_swapped_and_nobody_joins_before_them():
    driver = driver_with(preemption=PREEMPTIONS["vllm"](1))
    driver.submit(request([1, 2], [9] * 8, max_new_tokens=12))
    driver.submit(request(3, [8] * 8, max_new_tokens=12))
    for _ in range(5):
        driver.turn()
    driver.preempt(3)
    assert driver.scheduler.load().swapped == 0
    driver.turn()
    driver.preempt(1, 2)
    assert driver.scheduler.load().swapped == 2
    driver.submit(request(4, [7] * 8, priority=5))
    assert [samples[0].id for *_, samples in driver.scheduler._queue._waiting] == [1, 2, 4]
    driver.abort(1)
    assert driver.scheduler.load().swapped == 1
    driver.drain()


def test_by_length_short_ones_are_computed_again():
    driver = driver_with(preemption=PREEMPTIONS["auto"](12))
    driver.submit(request(1, [9] * 8, max_new_tokens=12))
    driver.submit(request(2, [8] * 8, max_new_tokens=12))
    driver.turn()
    driver.turn()
    driver.preempt(2)
    for _ in range(5):
        driver.turn()
    driver.preempt(1)
    assert (driver.scheduler.load().swapped, driver.scheduler.load().preemptions) == (1, 2)
    driver.drain()


def test_a_flushed_cache_is_empty_there_too():
    driver = driver_with()
    cached(driver, [9] * 30)
    assert driver.scheduler.load().offload_used_slots > 0
    driver.scheduler.flush_cache()
    driver.submit(request(3, [7] * 3))
    driver.run()
    assert driver.scheduler.load().offload_used_slots == 0
    driver.submit(request(4, [9] * 30))
    driver.run()
    assert driver.executor.restored == 0
    driver.drain()


def life(seed, admission, turned, preemption):
    """A random life whose pool and host memory are both too small."""
    chance = random.Random(seed)
    most = seed % 3
    drafts = {"drafting": partial(Drafting, Guesses(seed), most)} if most else {}
    driver = Driver(
        overlap=chance.random() < 0.6,
        choose=lambda i, index: chance.choice((1, 2)),
        slots=chance.randint(36, 70),
        max_rows=chance.randint(3, 12),
        prefill_tokens=chance.choice([2, 4, 8, 30]),
        prefix_caching=chance.random() < 0.8,
        prefix_eviction=chance.choice(["lru", "lfu"]),
        offload_slots=chance.choice([12, 60, 300]),
        offload_block=chance.choice([2, 3, 4]),
        admission=ADMISSIONS[admission],
        batching=batching(turned, max_waiting_tokens=3),
        preemption=PREEMPTIONS[preemption](8),
        adapters=frozenset({1, 2}),
        **drafts,
    )
    virtual = {1: {"virtual_tokens": 3}, 2: {"virtual_tokens": 5, "virtual_kv": True}}
    texts = [[1] * 30, [1, 2] * 15, [2, 2, 1] * 10]
    ids = op = 0
    for _ in range(100):
        driver.now += 1
        while driver.scheduler.load().waiting < 4:
            n = chance.choice([1, 1, 1, 2, 3])
            ids += n
            prompt = chance.choice(texts)[: chance.randint(1, 20)]
            adapter = chance.choice([0, 0, 0, 0, 1, 2])
            driver.submit(
                request(
                    range(ids - n + 1, ids + 1),
                    prompt,
                    max_new_tokens=chance.choice([1, 2, 5, 12]),
                    drafts=most,
                    salt=chance.choice(["", "", "tenant"]) + str(adapter or ""),
                    adapter=adapter,
                    **virtual.get(adapter, {}),
                    prompt_logprobs=chance.random() < 0.1,
                    priority=chance.randint(0, 1),
                )
            )
        alive = [i for i, s in driver.sequences.items() if not s.ended]
        if chance.random() < 0.08:
            driver.abort(*chance.sample(alive, min(len(alive), 2)))
        if chance.random() < 0.3:
            driver.preempt(*chance.sample(alive, min(len(alive), 3)))
        if chance.random() < 0.1:
            held = [i for i in alive if driver.sequences[i].held and not driver.sequences[i].ended]
            ids, op = ids + 1, op + 1
            fresh = request(ids, chance.choice(texts)[:9], max_new_tokens=6)
            driver.advance(op, [fresh], resume=held)
        driver.turn()
    driver.drain()
    return driver


@pytest.mark.compute
@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.sampled(5, "slow")
def test_nothing_is_lost_or_mixed_up(admission, preemption):
    restored = 0
    for seed in range(4):
        driver = life(seed, admission, ["mixed", "alternate"][seed % 2], preemption)
        restored += driver.executor.restored
    assert restored > 0
