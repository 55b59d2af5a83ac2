"""Traces through the scheduler under a virtual clock: what holds for every pair of policies."""

import random

import numpy as np
import pytest

from tokenpod.scheduler.kv.preemption import PREEMPTIONS
from tokenpod.scheduler.policies.by_name import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.sequences.work import Limits
from tokenpod.scheduler.steps.machine_times import MachineTimes
from tokenpod.simulator.machines import MACHINES
from tokenpod.simulator.simulator import Simulator
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.trace import Arrival

pytestmark = pytest.mark.compute

PAIRS = [(admission, turns) for admission in ADMISSIONS for turns in BATCHINGS]
TIMES = MachineTimes(1e-3, 1e-5, 1e-8, 2e-6, 1e-9)


def load(requests, seed, *, rate=400.0):
    """Short requests of uneven lengths in bursts, of two priorities, some with common prefixes."""
    chance, at, made = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += chance.expovariate(rate) if chance.random() < 0.7 else 0.0
        prompt = chance.randint(1, 60)
        most = chance.choice([4, 20, 120])
        made.append(
            Arrival(
                at,
                prompt,
                output_tokens=min(chance.randint(1, 150), most) if chance.random() < 0.5 else 3,
                max_new_tokens=most,
                priority=chance.choice([0, 0, 0, 1]),
                prefix_id=chance.randint(1, 5),
                prefix_tokens=chance.choice([0, 0, min(prompt, 20)]),
            )
        )
    return made


def simulated(
    admission, turns, arrivals, *, overlap=False, jumps=True, slots=1200, copy_seconds=0.0, **more
):
    scheduler = SkippingScheduler(
        Limits(slots, 40, 400, 64, offload_block=8, **more),
        admission=ADMISSIONS[admission],
        batching=batching(turns, max_waiting_tokens=5),
        preemption=PREEMPTIONS["swap"](1),
    )
    simulator = Simulator(
        scheduler,
        TIMES,
        arrivals,
        100,
        overlap=overlap,
        copy_seconds=copy_seconds,
        jumps=jumps,
    )
    outcome = simulator.run()
    scheduler.check()
    return outcome


def check(outcome, *, copies=False):
    """Nothing lost, nothing twice, never over capacity, first come first served, all ended.

    `copies`: those that wait for copies from the host's memory let others compute meanwhile.
    """
    arrivals = outcome.arrivals
    assert not outcome.refused
    assert [len(came) for came in outcome.tokens] == [
        min(each.output_tokens, each.max_new_tokens) for each in arrivals
    ]
    assert all((np.diff(came) > 0).all() for came in outcome.tokens)
    assert 0 < outcome.most_use <= 1
    for priority in set() if copies else {each.priority for each in arrivals}:
        began = [outcome.began[i] for i, each in enumerate(arrivals) if each.priority == priority]
        assert began == sorted(began)
    due = np.array([round(each.at * 1e9) for each in arrivals])
    assert (outcome.began >= due).all()
    ended, load = outcome.load.ended, outcome.load
    assert (load.running, load.waiting, ended.aborted) == (0, 0, 0)
    assert ended.stopped + ended.length == len(arrivals)
    assert ended.length == sum(each.output_tokens >= each.max_new_tokens for each in arrivals)


def walk(admission, turns, requests, seed, *, rate=400.0, slots=1200):
    arrivals = load(requests, seed, rate=rate)
    outcome = simulated(admission, turns, arrivals, overlap=seed % 2 == 1, slots=slots)
    check(outcome)
    # past_future may have drawn well enough.
    assert outcome.load.preemptions or admission != "optimistic"
    assert not outcome.load.preemptions or admission in ("optimistic", "past_future")
    assert outcome.wasted_tokens >= outcome.load.preemptions


def test_what_is_swapped_is_not_computed_again():
    arrivals = load(150, 11)
    plain = simulated("optimistic", "mixed", arrivals, overlap=True, slots=600)
    # A token takes as long to copy as ten to compute, and the host's memory is short, too.
    for offload_slots, copy_seconds in ((20_000, 0.0), (800, 2e-5)):
        more = {"offload_slots": offload_slots, "copy_seconds": copy_seconds}
        swapped = simulated("optimistic", "mixed", arrivals, overlap=True, slots=600, **more)
        check(swapped, copies=True)
        assert swapped.load.swapped_tokens > 1000
        assert swapped.load.fetched_tokens > 1000
        assert swapped.wasted_tokens < plain.wasted_tokens


@pytest.mark.sampled(2, "slow")
@pytest.mark.parametrize(("admission", "turns"), PAIRS)
def test_every_request_gets_its_tokens_in_its_turn(admission, turns):
    if admission == "optimistic":
        # Memory must get so short that it preempts.
        walk(admission, turns, 250, len(admission), rate=1600.0, slots=600)
    else:
        walk(admission, turns, 400, len(admission))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("admission", "turns"), PAIRS)
def test_so_do_a_hundred_thousand(admission, turns):
    walk(admission, turns, 100_000, seed=1)


@pytest.mark.sampled(3, "slow")
@pytest.mark.parametrize("overlap", [False, True], ids=["settled at once", "overlapped"])
@pytest.mark.parametrize(
    ("admission", "turns", "offload_slots"),
    [*((*pair, 0) for pair in PAIRS), ("optimistic", "mixed", 900), ("exact", "mixed", 900)],
)
def test_jumps_change_nothing(admission, turns, offload_slots, overlap):
    compare_jumps(admission, turns, offload_slots, overlap=overlap)


@pytest.mark.parametrize("more", [{"max_gap": 1_100_000}, {"shortest_first": True}], ids=str)
def test_jumps_change_nothing_where_steps_are_bounded_or_ordered(more):
    compare_jumps("exact", "mixed", 0, overlap=True, **more)


def compare_jumps(admission, turns, offload_slots, *, overlap, **more):
    """A trace with jumps and without."""
    chance, at, arrivals = random.Random(7), 0.0, []
    # Few at a time, with outputs long enough that many steps are alike.
    for _ in range(25):
        at += chance.expovariate(20.0)
        new = chance.choice([5, 60, 200])
        arrivals.append(Arrival(at, chance.randint(1, 100), new, max_new_tokens=new + 20))
    ways = [
        simulated(
            admission,
            turns,
            arrivals,
            overlap=overlap,
            jumps=jumps,
            slots=700,
            offload_slots=offload_slots,
            copy_seconds=1e-5,
            **more,
        )
        for jumps in (True, False)
    ]
    jumped, stepped = ways
    assert jumped.skipped > jumped.steps // 4
    assert (jumped.steps, stepped.skipped, jumped.end) == (stepped.steps, 0, stepped.end)
    assert [each.tolist() for each in jumped.tokens] == [each.tolist() for each in stepped.tokens]
    assert jumped.began.tolist() == stepped.began.tolist()
    assert jumped.cached.tolist() == stepped.cached.tolist()
    assert (jumped.load, jumped.wasted_tokens) == (stepped.load, stepped.wasted_tokens)
    assert jumped.mean_use == pytest.approx(stepped.mean_use)
    assert jumped.most_use == stepped.most_use


def test_the_same_trace_comes_to_the_same():
    arrivals = load(200, 3)
    first, again = (simulated("past_future", "mixed", arrivals) for _ in range(2))
    assert [each.tolist() for each in first.tokens] == [each.tolist() for each in again.tokens]


def test_common_prefixes_are_found_and_what_can_never_fit_is_refused():
    alike = [Arrival(at, 50, 5, 20, prefix_id=3, prefix_tokens=40) for at in (0.0, 0.5, 1.0)]
    outcome = simulated("exact", "mixed", [*alike, Arrival(1.5, 399, 5, 20)])
    assert outcome.cached.tolist() == [0, 40, 40, 0]
    assert outcome.refused == {3}
    assert len(outcome.tokens[3]) == 0
    assert outcome.load.ended.ignored == 1


def test_a_lone_request_takes_what_its_steps_take():
    outcome = simulated("exact", "mixed", [Arrival(2.0, 10, 3, 9)])
    prompt = TIMES.fixed + 10 * TIMES.prompt_token + 55 * TIMES.pair
    steps = [TIMES.fixed + TIMES.row + context * TIMES.context for context in (10, 11)]
    expected = 2.0 + np.cumsum([prompt, *steps])
    assert outcome.tokens[0] / 1e9 == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_step_times_are_those_that_were_measured(machine):
    times = machine.step_times
    for size, seconds in machine.measured:
        assert times.nanoseconds(size) / 1e9 == pytest.approx(seconds, rel=0.15)
