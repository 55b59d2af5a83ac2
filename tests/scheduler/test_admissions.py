"""What each admission policy promises, and who gives way where it has promised too much."""

import random
from functools import partial

import numpy as np
import pytest

from support.engines.scheduler_driver import Driver, request
from tokenpod.scheduler.kv.kv import KV
from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.ledger import Ledger
from tokenpod.scheduler.policies.optimistic import Optimistic
from tokenpod.scheduler.policies.past_future import HISTORY, Lengths, PastFuture
from tokenpod.scheduler.policies.reserve import Reserve
from tokenpod.scheduler.sequences.sequence import Sequence
from tokenpod.scheduler.sequences.table import Table
from tokenpod.scheduler.sequences.work import Limits


def running(driver):
    return sorted(i for i, s in driver.scheduler._sequences.items() if s.row >= 0)


# -- reserve -----------------------------------------------------------------------------------


def test_reserve_lets_in_as_many_bounds_as_fit():
    driver = Driver(slots=30, max_rows=8, prefill_tokens=30, admission=Reserve)
    for i in range(1, 5):
        driver.submit(request(i, [i] * 5, max_new_tokens=6))
    driver.turn()
    # A bound is 5 + 6 - 1: the last token is never written.
    assert running(driver) == [1, 2, 3]
    driver.drain()


def test_reserve_waits_for_an_end_where_exact_foresees_it():
    joined = {}
    for admission in ({}, {"admission": Reserve}):
        driver = Driver(slots=30, max_rows=8, prefill_tokens=30, **admission)
        driver.submit(request(1, [1] * 18, max_new_tokens=4))
        driver.turn()
        driver.submit(request(2, [2] * 4, max_new_tokens=16))
        driver.turn()
        joined[bool(admission)] = running(driver)
        driver.drain()
    assert joined == {False: [1, 2], True: [1]}


def test_samples_reserve_their_prompt_once():
    driver = Driver(slots=36, max_rows=8, prefill_tokens=30, admission=Reserve)
    # 20 + 4 - 1, and 4 for each sample more: 31 at the most.
    driver.submit(request([1, 2, 3], [1] * 20, max_new_tokens=4))
    driver.submit(request(4, [4] * 2, max_new_tokens=4))
    driver.turn()
    driver.turn()
    assert running(driver) == [1, 2, 3, 4]
    driver.drain()


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("seed", range(3))
def test_exact_never_needs_more_than_reserve(seed):
    chance, ids = random.Random(seed), 0
    driver = Driver(slots=120, max_rows=10, prefill_tokens=8, overlap=seed % 2 == 1)
    scheduler, compared = driver.scheduler, 0
    for op in range(200):
        if chance.random() < 0.5:
            n = chance.choice([1, 1, 3])
            ids += n
            prompt = [chance.randint(1, 2)] * chance.randint(1, 15)
            new = chance.randint(1, 20)
            driver.submit(request(range(ids - n + 1, ids + 1), prompt, max_new_tokens=new))
        if chance.random() < 0.05:
            ids += 1
            driver.advance(op, [request(ids, [3] * 4, max_new_tokens=6)])
        driver.turn()
        exact = Ledger(scheduler._admission, scheduler.kv.tree)
        bounds = Ledger(Reserve(scheduler.kv.table, scheduler.limits, 8), scheduler.kv.tree)
        for ledger in (exact, bounds):
            scheduler._batcher.add_to(ledger)
            scheduler._routed.add_to(ledger)
            ledger.peak()
        # Exact allows for two steps in which a sequence that has ended is not seen yet.
        assert exact.peak() <= bounds.peak()
        compared += exact.peak() < bounds.peak()
    assert compared > 50
    driver.drain()


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("offload", [0, 60])
@pytest.mark.parametrize("policy", [Reserve, Optimistic])
def test_sums_of_what_never_grows_are_the_peak_of_its_entries(policy, offload):
    chance, ids, looked_at = random.Random(5), 0, 0
    shape = {"slots": 120, "max_rows": 10, "prefill_tokens": 8, "offload_slots": offload}
    preemption = PREEMPTIONS["swap" if offload else "recompute"](1)
    driver = Driver(**shape, overlap=True, admission=policy, preemption=preemption, offload_block=3)
    scheduler = driver.scheduler
    for op in range(140):
        n = chance.choice([0, 1, 1, 3])
        ids += n
        prompt = [chance.randint(1, 2)] * chance.randint(4, 15)
        if n:
            new = chance.randint(1, 20)
            driver.submit(request(range(ids - n + 1, ids + 1), prompt, max_new_tokens=new))
        if chance.random() < 0.2:
            ids += 1
            kind = chance.choice(["probe", "router", "abort"])
            if kind == "probe":
                driver.submit(request(ids, prompt, max_new_tokens=1, probe=True))
            elif kind == "router":
                driver.advance(op, [request(ids, prompt, max_new_tokens=6)])
            else:
                driver.abort(ids - 3)
        driver.turn()
        sums, entries = (Ledger(scheduler._admission, scheduler.kv.tree) for _ in range(2))
        for ledger in (sums, entries):
            for planner in reversed(scheduler._planners):
                planner.add_to(ledger)
        entries._grows_from = 0
        assert sums.peak() == entries.peak()
        looked_at += sums.peak() > 60 and scheduler._probes.reserved == 0
    assert looked_at > 5
    driver.drain()


# -- optimistic --------------------------------------------------------------------------------


def test_the_watermark_stays_free_when_a_request_joins_others():
    for prompt, joins in ((891, True), (892, False)):
        driver = Driver(slots=1000, max_rows=4, prefill_tokens=2000, admission=Optimistic)
        driver.submit(request(1, [1] * 99, max_new_tokens=50))
        driver.turn()
        driver.submit(request(2, [2] * prompt, max_new_tokens=2))
        driver.turn()
        # 99 are held; with 891 more 10 of 1000 are left.
        assert (2 in running(driver)) == joins
        driver.drain()


def test_what_fits_alone_joins_without_a_watermark():
    driver = Driver(slots=1000, max_rows=4, prefill_tokens=2000, admission=Optimistic)
    driver.submit(request(1, [1] * 990, max_new_tokens=11))
    driver.drain()
    assert len(driver.outputs(1)) == 11
    assert driver.scheduler.load().preemptions == 0


def test_a_running_row_may_take_the_watermark():
    driver = Driver(slots=1000, max_rows=4, prefill_tokens=2000, admission=Optimistic)
    driver.submit(request(1, [1] * 480, max_new_tokens=11))
    driver.submit(request(2, [2] * 500, max_new_tokens=11))
    driver.drain()
    assert driver.scheduler.load().preemptions == 0


def test_nobody_joins_in_a_step_in_which_somebody_gives_way():
    driver = Driver(slots=100, max_rows=20, prefill_tokens=200, admission=Optimistic)
    for i in range(1, 11):
        driver.submit(request(i, [i] * (11 if i == 1 else 8), max_new_tokens=30))
    driver.turn()
    driver.turn()
    # 93 are held, and ten rows want one each; two more would leave 1 of 100 free.
    driver.submit(request(11, [11] * 2, max_new_tokens=2))
    driver.turn()
    assert running(driver) == [*range(1, 10)]
    assert driver.scheduler.load().preemptions == 1
    driver.turn()
    driver.drain()
    assert len(driver.outputs(11)) == 2


def test_the_lowest_priority_gives_way_before_the_last_arrival():
    driver = Driver(slots=60, max_rows=8, prefill_tokens=60, admission=Optimistic)
    driver.submit(request(1, [1] * 10, max_new_tokens=25, priority=-1))
    driver.submit(request(2, [2] * 10, max_new_tokens=25))
    driver.submit(request(3, [3] * 10, max_new_tokens=25))
    while not driver.scheduler.load().preemptions:
        driver.turn()
    assert running(driver) == [2, 3]
    driver.drain()


def test_all_samples_of_a_request_give_way_together_unless_it_runs_alone():
    driver = Driver(slots=60, max_rows=8, prefill_tokens=60, admission=Optimistic)
    driver.submit(request(1, [1] * 10, max_new_tokens=30))
    driver.submit(request([2, 3], [2] * 10, max_new_tokens=15))
    while not driver.scheduler.load().preemptions:
        driver.turn()
    assert running(driver) == [1]
    driver.drain()
    # A router has the rest of the pool, which came when there was room.
    driver = Driver(slots=60, max_rows=8, prefill_tokens=60, admission=Optimistic)
    driver.submit(request([1, 2], [1] * 10, max_new_tokens=20))
    driver.turn()
    driver.turn()
    driver.advance(1, [request(3, [3] * 5, max_new_tokens=31)])
    while not driver.scheduler.load().preemptions:
        driver.turn()
    assert running(driver) == [1, 3]
    driver.run()
    driver.abort(3)
    driver.drain()
    assert [len(driver.outputs(i)) for i in (1, 2)] == [20, 20]


# -- past_future -------------------------------------------------------------------------------


def test_a_new_length_is_one_of_the_last_ends():
    lengths = Lengths(1000, seed=1)
    for length in range(1, HISTORY + 1):
        lengths.add(length)
    drawn = lengths.of_new(10_000, 4000)
    assert set(drawn.tolist()) == set(range(1, HISTORY + 1))
    assert lengths.of_new(7, 500).max() == 7


def test_the_limit_stands_for_ends_until_enough_are_known():
    lengths = Lengths(1000, seed=1)
    lengths.add(3)
    assert np.mean(lengths.of_new(5000, 5000) == 1000) == pytest.approx(100 / 101, abs=0.01)
    for _ in range(HISTORY):
        lengths.add(3)
    assert set(lengths.of_new(5000, 100).tolist()) == {3}


def test_a_running_length_is_uniform_on_the_line_through_the_known_ones_above():
    lengths = Lengths(60, seed=2)
    for length in (10, 20) * 30 + (40,) * 140:
        lengths.add(length)
    drawn = lengths.of_running(np.array([15, 50, 39]), np.array([100, 100, 40]), 20_000)
    first, beyond, cut = drawn.astype(float).T
    # Above 15: 30 times 20, 140 times 40, then the most: 171 pieces.
    assert first.min() >= 15
    assert np.mean(first < 20) == pytest.approx(1 / 171, abs=0.003)
    assert np.mean(first == 20) == pytest.approx(29 / 171, abs=0.01)
    assert np.mean(first == 40) == pytest.approx(139 / 171, abs=0.01)
    assert np.mean(first > 40) == pytest.approx(1 / 171, abs=0.003)
    # Above 50 nothing is known: one piece to the most.
    assert (beyond.mean(), beyond.min()) == (pytest.approx(75, abs=1), 50)
    assert set(cut.tolist()) <= {39, 40}


def test_the_need_is_the_papers_formula():
    chance = np.random.default_rng(3)
    held, left = chance.integers(1, 90, 40), chance.integers(0, 60, 40)
    drawn = {}

    class Drawn(PastFuture):
        def held(self, needs):
            return needs.computed

        def growth(self, needs):
            return np.broadcast_to([drawn[n] for n in needs.bound.tolist()], (needs.draws, 1))

    kv = KV(10_000)
    ledger = Ledger(Drawn(kv.table, Limits(10_000, 64, 10, prefill_tokens=8), 8), kv.tree)
    for i, (h, rest) in enumerate(zip(held.tolist(), left.tolist(), strict=True), 1):
        one = request(i, [i] * h, max_new_tokens=1000 - h + i)
        drawn[1000 + i - 1] = rest
        sequence = Sequence(one, 0, np.array(one.prompt, np.int32), kv.table)
        kv.begin(sequence)
        ledger.prefilling(sequence)
        ledger.peak()
    order = np.argsort(-left, kind="stable")
    count = np.arange(1, 41)
    assert ledger.peak() == (left[order] * count + held[order].cumsum()).max()
    part = order[order < 17]
    expected = (left[part] * np.arange(1, 18) + held[part].cumsum()).max()
    assert ledger.peak(17) == expected


def past_future(seed=0, **limits):
    return Driver(
        **{"slots": 200, "max_rows": 16, "prefill_tokens": 64, "max_positions": 101} | limits,
        admission=partial(PastFuture, seed=seed),
        choose=lambda sequence_id, index: 9 if index == sequence_id % 5 else 1,
    )


def test_more_run_at_once_when_outputs_have_turned_out_short():
    driver = past_future()
    at_once = []
    for i in range(1, 200):
        driver.submit(request(i, [i] * 10, max_new_tokens=90, eos_token_ids=frozenset({9})))
    while driver.turn():
        at_once.append(len(running(driver)))
    # Nothing is known at first: each is taken to need all of its 90 tokens, and 0.95 of the pool
    # have no room for two.
    assert max(at_once[:2]) == 1
    assert max(at_once) > 6
    driver.drain()


def test_lengths_that_clients_cut_short_are_not_learnt():
    driver = past_future()
    for i in range(1, 9):
        driver.submit(request(i * 5 + 4, [i] * 3, max_new_tokens=90))
        driver.turn()
        driver.abort(i * 5 + 4)
    assert set(driver.scheduler._admission._lengths._ended) == {100}
    driver.submit(request(1, [1] * 3, max_new_tokens=9))
    driver.turn()
    driver.turn()
    driver.scheduler.abort([1], stopped=True)
    driver.sequences[1].ended = "stop sequence"
    driver.run()
    assert driver.scheduler._admission._lengths._ended[-1] == 2
    driver.drain()


def test_draws_that_were_too_low_make_the_last_arrival_give_way():
    # With most seeds a later request joins only when it fits.
    driver = past_future(seed=2, slots=100)
    for i in range(1, 40):
        driver.submit(request(i, [i] * 5, max_new_tokens=5, eos_token_ids=frozenset({9})))
    driver.run()
    for i in range(104, 204, 5):
        # Their outputs are far longer than those before.
        driver.submit(request(i, [i] * 5, max_new_tokens=60))
    driver.drain()
    assert driver.scheduler.load().preemptions > 0
    assert all(len(driver.outputs(i)) == 60 for i in range(104, 204, 5))


def test_draws_have_a_seed_of_their_own():
    table, lengths = Table(), [Lengths(500, seed=s) for s in (4, 4, 5)]
    for each in lengths:
        for length in range(200):
            each.add(length)
    ones, same, others = (each.of_new(500, 50).tolist() for each in lengths)
    assert ones == same != others
    assert len(table.row) == 64


# -- states ------------------------------------------------------------------------------------


def test_requests_are_counted_by_how_they_ended():
    driver = Driver(
        slots=60, max_rows=4, prefill_tokens=30, choose=lambda i, index: 9 if i == 1 else 1
    )
    driver.submit(request(1, [1] * 3, eos_token_ids=frozenset({9})))
    driver.submit(request(2, [2] * 3))
    driver.submit(request([3, 4], [3] * 3, max_new_tokens=20))
    driver.submit(request(5, [5] * 59, max_new_tokens=30))
    driver.turn()
    driver.turn()
    driver.abort(3)
    ended = driver.scheduler.load().ended
    # One sample of two still runs.
    assert (ended.stopped, ended.length, ended.aborted, ended.ignored) == (1, 0, 0, 1)
    driver.abort(4)
    driver.drain()
    driver.submit(request(6, [6] * 3, max_new_tokens=9))
    driver.turn()
    driver.scheduler.abort([6], stopped=True)
    driver.sequences[6].ended = "stop sequence"
    driver.drain()
    ended = driver.scheduler.load().ended
    assert (ended.stopped, ended.length, ended.aborted, ended.ignored) == (2, 1, 1, 1)
