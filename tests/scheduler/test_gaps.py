"""Steps with prompts are kept short while others stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import repeat

import numpy as np
import pytest

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.policies.batching import Mixed
from tokenpod.scheduler.policies.exact import Exact
from tokenpod.scheduler.scheduler import Scheduler
from tokenpod.scheduler.sequences.work import Limits
from tokenpod.scheduler.steps.estimates import Estimates
from tokenpod.scheduler.steps.gaps import GapBound
from tokenpod.scheduler.steps.machine_times import MachineTimes, StepSize
from tokenpod.scheduler.steps.step import Step
from tokenpod.simulator.simulator import Outcome, Simulator
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.trace import Arrival

#: Of an 8B model on a large GPU, about.
TIMES = MachineTimes(4e-3, 1.4e-5, 3e-8, 2e-5, 1e-9)
MS = 1_000_000
BOUND = 60 * MS


def learned(noise: float = 0.0, steps: int = 80) -> GapBound:
    """A bound that has seen steps of all sizes on that machine."""
    chance, bound = np.random.default_rng(3), GapBound(BOUND, 256, 8192)
    for _ in range(steps):
        rows, tokens = int(chance.integers(0, 600)), int(2 ** chance.uniform(6, 13))
        start = int(chance.integers(0, 20_000))
        size = StepSize(rows, rows * 300, tokens, tokens * start + tokens * tokens // 2)
        took = TIMES.nanoseconds(size) * (1 + noise * chance.normal())
        bound.note(size, int(took))
        bound.prompt_tokens(1, 1, [])
    return bound


def taken(rows: int, context: int, prompts: list[tuple[int, int]], tokens: int) -> float:
    """Milliseconds of a step with so many of these prompts' tokens."""
    pairs = 0
    for start, n in [*prompts, *repeat((0, 512), 40)]:
        piece, tokens = min(n, tokens), max(tokens - n, 0)
        pairs += piece * start + piece * (piece + 1) // 2
        if not tokens:
            break
    total = sum(n for _, n in prompts)
    return TIMES.nanoseconds(StepSize(rows, context, total, pairs)) / MS


@pytest.mark.parametrize("rows", [1, 200, 800])
@pytest.mark.parametrize("start", [0, 30_000])
def test_what_has_been_learned_of_steps_fills_the_bound(rows: int, start: int):
    for noise, slack in ((0.0, 0.02), (0.05, 0.12)):
        tokens = learned(noise).prompt_tokens(rows, 300 * rows, [(start, 100_000)])
        took = taken(rows, 300 * rows, [(start, tokens)], tokens)
        assert took == pytest.approx(BOUND / MS, rel=slack), (noise, tokens)


def test_a_prompt_behind_a_long_text_has_fewer_tokens_in_a_step():
    bound = learned()
    counts = [bound.prompt_tokens(8, 8000, [(start, 100_000)]) for start in (0, 20_000, 100_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2 * counts[2]


def test_prompts_go_on_beside_rows_that_take_longer_than_the_bound():
    """By half of what the rows take; where that is nothing to speak of, by the least."""
    rows, context = 4000, 300 * 4000
    alone = TIMES.nanoseconds(StepSize(rows, context)) / MS
    tokens = learned().prompt_tokens(rows, context, [(0, 100_000)])
    assert alone > BOUND / MS
    assert taken(rows, context, [(0, tokens)], tokens) == pytest.approx(1.5 * alone, rel=0.02)
    slow = GapBound(1, 256, 8192)
    for tokens in (512, 700, 900, 2000):
        slow.note(StepSize(1, 10, tokens, tokens**2 // 2), MS * (1 + 100 * tokens))
    assert slow.prompt_tokens(1, 10, [(0, 100_000)]) == 256


def test_a_step_is_never_larger_than_it_can_be():
    fast = GapBound(10**12, 256, 8192)
    for tokens in (100, 200, 300, 5000):
        fast.note(StepSize(1, 10, tokens, tokens**2 // 2), 1000 + tokens)
    assert fast.prompt_tokens(1, 10, [(0, 100_000)]) == 8192


def test_while_nothing_is_known_steps_are_small():
    assert GapBound(BOUND, 256, 8192).prompt_tokens(1, 10, []) == 256


def test_other_work_between_steps_takes_no_longer_than_a_step():
    """On a GPU the host queues it while the step is computed."""
    bound, step = learned(), TIMES.nanoseconds(StepSize(16, 16 * 300))
    assert bound.beside(16, 16 * 300) == pytest.approx(step, rel=0.02)
    most = TIMES.nanoseconds(StepSize(600, 600 * 1400))
    assert bound.beside(600, 600 * 1400) == pytest.approx(BOUND - most, rel=0.05)
    assert bound.beside(0, 0) == BOUND, "nobody waits"
    assert GapBound(BOUND, 256, 8192).beside(1, 10) == 0, "nothing is known"


def test_one_step_that_was_held_up_changes_little():
    bound = learned()
    before = bound.prompt_tokens(100, 30_000, [(0, 100_000)])
    bound.note(StepSize(100, 30_000, 2000, 2_000_000), 60_000 * MS)
    for _ in range(4):
        size = StepSize(100, 30_000, 2000, 2_000_000)
        bound.note(size, TIMES.nanoseconds(size))
    assert bound.prompt_tokens(100, 30_000, [(0, 100_000)]) > 0.7 * before


def simulated(max_gap: int | None, arrivals: list[Arrival]) -> tuple[Outcome, list[Step]]:
    """What a machine does with these; steps with prompts."""
    limits = Limits(400_000, 256, 65_536, prefill_tokens=8192, max_gap=max_gap)
    scheduler = SkippingScheduler(limits, admission=Exact, batching=Mixed)
    steps: list[Step] = []

    def note(step: Step, now: int) -> None:
        del now
        if step.prompt_tokens:
            steps.append(step)

    simulator = Simulator(
        scheduler, TIMES, arrivals, max_new_tokens=200, overlap=True, on_step=note
    )
    return simulator.run(), steps


def longest_gap(outcome: Outcome) -> float:
    """Milliseconds, of all streams."""
    return max(float(np.diff(came).max()) for came in outcome.tokens if len(came) > 1) / MS


def burst() -> Iterator[Arrival]:
    """Two hundred at once, and then a long prompt."""
    chance = np.random.default_rng(5)
    for _ in range(200):
        yield Arrival(0.0, int(chance.integers(20, 900)), int(chance.integers(30, 200)), 200)
    yield Arrival(0.3, 30_000, 8, 8)


def test_a_burst_streams_within_the_bound_and_takes_no_longer():
    (free, _), (bound, steps) = (simulated(gap, [*burst()]) for gap in (None, BOUND))
    assert longest_gap(free) > 150
    # Two are under way when the first time is known, and the model learns from those before.
    assert longest_gap(bound) < 1.1 * BOUND / MS
    assert bound.end < 1.1 * free.end
    # Nobody streams yet.
    assert steps[0].prompt_tokens == 8192


class SlowAtFirst:
    """A machine whose first steps take long, and whose times vary."""

    def __init__(self) -> None:
        self._slow, self._chance = 4, np.random.default_rng(7)

    def nanoseconds(self, size: StepSize) -> int:
        took = TIMES.nanoseconds(size) * (1 + 0.06 * abs(self._chance.normal()))
        self._slow -= size.prompt_tokens > 0
        return int(took + 150 * MS * (self._slow >= 0))


def test_steps_that_were_timed_before_outweigh_slow_first_ones():
    sizes = [StepSize(0, 0, 8192, 16 * 512 * 256), StepSize(0, 0, 2048, 2048 * 17_000)]
    sizes += [StepSize(rows, rows * 512) for rows in (1, 64, 256)]
    measured = [(size, 1.05 * TIMES.nanoseconds(size) / 1e9) for size in sizes]
    limits = Limits(400_000, 256, 65_536, prefill_tokens=8192, max_gap=BOUND)
    scheduler = SkippingScheduler(limits, admission=Exact, batching=Mixed, measured=measured)
    arrivals = [Arrival(each.at + 1e-4 * n, *astuple(each)[1:]) for n, each in enumerate(burst())]
    simulator = Simulator(
        scheduler, SlowAtFirst(), arrivals, max_new_tokens=200, overlap=True, jumps=False
    )
    gaps = np.concatenate([np.diff(came) / MS for came in simulator.run().tokens])
    # But for those that the machine makes itself.
    assert float(np.quantile(gaps, 0.99)) < 1.25 * BOUND / MS


class WithKnee:
    """A machine whose steps with prompts take half as long again from so many rows on."""

    def nanoseconds(self, size: StepSize) -> int:
        slow = size.prompt_tokens > 0 and size.rows > 100
        return int(TIMES.nanoseconds(size) * (1.5 if slow else 1.0))


def test_steps_that_no_line_describes_keep_the_bound_after_the_first_ones():
    limits = Limits(400_000, 256, 65_536, prefill_tokens=8192, max_gap=BOUND)
    scheduler = SkippingScheduler(limits, admission=Exact, batching=Mixed)
    times: list[float] = []
    came = [0]

    def note(step: Step, now: int) -> None:
        if step.prompt_tokens and step.size.rows > 100:
            times.append((now - came[0]) / MS)
        came[0] = now

    simulator = Simulator(
        scheduler, WithKnee(), [*burst()], 200, overlap=True, jumps=False, on_step=note
    )
    simulator.run()
    # Two are seen and two are under way before that counts.
    assert max(times[:4]) > 1.2 * BOUND / MS
    assert np.quantile(times[4:], 0.9) < 1.05 * BOUND / MS
    assert max(times[4:]) < max(times[:4])


def test_a_step_whose_launch_was_held_up_counts_as_long_as_the_device_computed_it():
    """It settles late and the next one soon, as some of a burst on a GPU did."""
    budgets = []
    for held_up in (False, True):
        gaps = GapBound(BOUND, 256, 8192)
        estimates, now = Estimates(8192, gaps=gaps), 0
        for number in range(40):
            scheduler = Scheduler(Limits(40_000, 64, 16_384, prefill_tokens=8192))
            prompt = [3] * (1500 + 20 * number)
            scheduler.submit(Request([0], prompt, SamplingParams(), StoppingParams(9)))
            step = scheduler.plan(now)
            computed = TIMES.nanoseconds(step.size)
            estimates.planned(now)
            now += (2 * computed - MS if number % 2 else MS) if held_up else computed
            estimates.settled(step, now, 0, computed)
        budgets.append(gaps.prompt_tokens(0, 0, [(0, 100_000)]))
    assert budgets[0] == budgets[1]


#: Of a model of a billion parameters on two cores, about.
SLOW = MachineTimes(30e-3, 1e-3, 1e-7, 4e-3, 1e-7)


def test_on_a_slow_machine_prompts_go_on_in_small_steps_within_the_bound():
    """One stream, and prompts of another client; nothing was timed before."""
    limits = Limits(60_000, 16, 8192, prefill_tokens=512, max_gap=100 * MS, short_prompts=True)
    scheduler = SkippingScheduler(limits, admission=Exact, batching=Mixed)
    arrivals = [Arrival(0.0, 40, 400, 400), *(Arrival(3.0, 1700, 4, 4) for _ in range(3))]
    arrivals.append(Arrival(200.0, 1700, 4, 4))
    sizes: list[StepSize] = []

    def note(step: Step, now: int) -> None:
        del now
        if step.prompt_tokens:
            sizes.append(step.size)

    simulator = Simulator(
        scheduler, SLOW, arrivals, max_new_tokens=400, overlap=False, on_step=note
    )
    outcome = simulator.run()
    assert [len(came) for came in outcome.tokens] == [400, 4, 4, 4, 4]
    assert longest_gap(outcome) < 105
    # Requests that arrive while a prompt is computed alone wait no longer, either.
    assert any(not size.rows and size.prompt_tokens > 8 for size in sizes)
    assert max(SLOW.nanoseconds(size) for size in sizes) < 105 * MS


def test_a_step_has_at_most_twice_the_prompt_tokens_of_the_largest_before():
    """What is far from all that was seen is not known: such a step is taken in between first."""
    bound, most = GapBound(BOUND, 8, 512), 0
    for _ in range(40):
        tokens = bound.prompt_tokens(1, 10, [(0, 100_000)])
        assert tokens <= max(2 * most, 8)
        most = max(most, tokens)
        bound.note(StepSize(1, 10, tokens, tokens**2 // 2), MS)
    assert most == 512


def test_exact_admission_counts_with_the_least_that_steps_have():
    """A machine so slow that each step has the least: no request runs out of slots."""
    limits = Limits(6000, 64, 4096, prefill_tokens=1024, max_gap=1)
    scheduler = Scheduler(limits)
    assert limits.least_prompt_tokens == 16
    sizes = set()
    for number in range(40):
        stopping = StoppingParams(100 + number, eos_token_ids=frozenset())
        prompt = [number + 2] * (50 + 20 * number)
        scheduler.submit(Request([number], prompt, SamplingParams(), stopping))
    now = 0
    while (step := scheduler.plan(now)) is not None:
        now += MS * (1 + 100 * step.prompt_tokens)
        scheduler.settle(step, [1] * step.plan.sampling, now)
        scheduler.check()
        if step.size.rows:
            sizes.add(step.size.prompt_tokens)
    assert scheduler.load().preemptions == 0
    assert scheduler.load().ended.length == 40
    assert max(sizes) <= 4 * 16
