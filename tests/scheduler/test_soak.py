"""Small pools, long queues: the forecast has no slack here, so what it forgets is a stall."""

from __future__ import annotations

import random
from functools import partial

import pytest

from support.engines.scheduler_driver import Driver, Guesses, request
from support.examples import ALL
from tokenpod.core.windows import WindowRoom
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.policies.by_name import ADMISSIONS, BATCHINGS, batching

pytestmark = pytest.mark.compute


def soak(
    seed: int,
    turns: int,
    admission: str = "exact",
    turned: str = "mixed",
    window: int | None = None,
) -> Driver:
    chance = random.Random(seed)
    nan = chance.choice([0.0, 0.0, 0.02])
    most = seed % 4
    drafts = {"drafting": partial(Drafting, Guesses(seed), most)} if most else {}
    windows = None
    if window is not None:
        windows = WindowRoom(window, 0, page=3, taken_back=5).for_rows(17, 40, 46)
    driver = Driver(
        windows=windows,
        # What is left behind is then given to others at once.
        prefix_caching=window is None or bool(seed % 2),
        overlap=chance.random() < 0.5,
        choose=lambda sequence_id, index: -1 if chance.random() < nan else chance.choice((1, 2)),
        slots=chance.randint(36, 70),
        max_rows=chance.randint(6, 16),
        prefill_tokens=chance.choice([2, 4, 8, 30]),
        admission=ADMISSIONS[admission],
        batching=batching(turned, max_waiting_tokens=3),
        **drafts,
    )
    texts = [[1] * 30, [1, 2] * 15, [2, 2, 1] * 10]
    ids = op = 0
    routed, preempts = chance.random() < 0.3, chance.random() < 0.3
    for _ in range(turns):
        driver.now += 1
        while driver.scheduler.load().waiting < 4:
            n = chance.choice([1, 1, 1, 2, 3])
            ids += n
            prompt = chance.choice(texts)[: chance.randint(1, 14)]
            new = chance.choice([1, 2, 5, 12])
            deadline = driver.now + 12 if chance.random() < 0.05 else None
            ids_now = range(ids - n + 1, ids + 1)
            driver.submit(
                request(ids_now, prompt, max_new_tokens=new, deadline_at=deadline, drafts=most)
            )
        alive = [i for i, s in driver.sequences.items() if not s.ended]
        if chance.random() < 0.08:
            driver.abort(*chance.sample(alive, min(len(alive), 2)))
        if preempts and chance.random() < 0.3:
            driver.preempt(*chance.sample(alive, min(len(alive), 3)))
        if routed and chance.random() < 0.3:
            held = [i for i in alive if driver.sequences[i].held and not driver.sequences[i].ended]
            ids, op = ids + 1, op + 1
            prompt = chance.choice(texts)[: chance.randint(1, 14)]
            fresh = request(ids, prompt, max_new_tokens=6, drafts=most)
            start = [fresh] if chance.random() < 0.4 else []
            driver.advance(op, start, resume=held)
        driver.turn()
        # The service forgets what has ended; so does this client, to stay quick.
        if len(driver.sequences) > 200:
            flying = driver.planned()
            driver.sequences = {
                i: s for i, s in driver.sequences.items() if not s.ended or s.held or i in flying
            }
    driver.drain()
    return driver


LATER = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 120, 10))


@pytest.mark.parametrize("seed", [0, *LATER])
def test_nothing_ever_runs_out_of_memory(seed):
    # Of ten, four in every run: with none to three drafts.
    lives = [soak(each, 150) for each in range(seed, seed + 10, 1 if ALL else 3)]
    assert sum(life.steps for life in lives) > 100 * len(lives)
    assert sum(life.accepted for life in lives) > 5 * len(lives)


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("window", [1, 2, 5, 9])
def test_window_slots_never_run_out_and_hold_what_is_read(window):
    lives = [soak(seed, 150, window=window) for seed in range(window, window + (12 if ALL else 2))]
    assert sum(life.steps for life in lives) > 100 * len(lives)
    assert any(life.scheduler.kv.windows.used for life in lives)


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize("admission", ["optimistic", "past_future"])
def test_window_slots_hold_what_is_read_where_sequences_are_preempted(admission):
    lives = [soak(seed, 150, admission, window=4) for seed in range(8 if ALL else 2)]
    assert sum(life.scheduler.load().preemptions for life in lives)


PAIRS = [(a, b) for a in ADMISSIONS for b in BATCHINGS if (a, b) != ("exact", "mixed")]


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize(("admission", "turned"), PAIRS)
def test_nothing_is_lost_under_any_pair_of_policies(admission, turned):
    preemptions = 0
    for seed in range(4) if ALL else (0, 3):
        driver = soak(seed, 150, admission, turned)
        preemptions += driver.scheduler.load().preemptions
    assert preemptions or admission in ("exact", "reserve")
