"""Who is next among waiting requests of one priority."""

from __future__ import annotations

import random
from itertools import chain, pairwise

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.planners.order import Arrival, Shortest
from tokenpod.scheduler.scheduler import Limits, Scheduler

PREFILL = 16


def test_first_come_is_first_served():
    order = Arrival()
    assert [order.number(tokens) for tokens in (9, 1, 5)] == [1, 2, 3]


def test_short_prompts_pass_longer_ones_up_to_a_bound():
    """Nothing that comes later and is served earlier is more than a prompt lets pass."""
    chance, order = random.Random(1), Shortest(1000)
    lengths = [chance.choice([1, 20, 40, 60, 300]) for _ in range(3000)]
    numbers = [order.number(tokens) for tokens in lengths]
    assert len({*numbers}) == len(numbers)
    passed: dict[int, int] = dict.fromkeys(lengths, 0)
    for at, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        later = zip(numbers[at + 1 :], lengths[at + 1 :], strict=True)
        by = sum(n for other, n in later if other < number)
        assert by <= min(256 * length, 64_000)
        passed[length] = max(passed[length], by)
    # The bound is used.
    assert passed[300] > 8_000


def served(*, shortest: bool, prompts: list[int]) -> list[list[int]]:
    """The numbers of requests by the step that brought their first tokens."""
    limits = Limits(9000, 90, 500, prefill_tokens=300, shortest_first=shortest)
    scheduler = Scheduler(limits)
    begun: list[list[int]] = []
    for number, tokens in enumerate(prompts):
        stopping = StoppingParams(3, eos_token_ids=frozenset())
        scheduler.submit(Request([number], [number + 2] * tokens, SamplingParams(), stopping))
    while (step := scheduler.plan(0)) is not None:
        settled = scheduler.settle(step, [1] * step.plan.sampling, 0)
        scheduler.check()
        if settled.started:
            begun.append([started.sequence_id for started in settled.started])
    return begun


def test_a_burst_is_computed_shortest_first_or_as_it_came():
    chance = random.Random(2)
    prompts = [chance.randint(1, 60) for _ in range(80)]
    for shortest in (False, True):
        steps = served(shortest=shortest, prompts=prompts)
        assert len(steps) > 5
        assert sorted(chain(*steps)) == [*range(80)]
        rank = prompts if shortest else range(80)
        # A little longer and a little earlier is before a little shorter and a little later.
        slack = sum(prompts) // 256 + 1 if shortest else 0
        for earlier, later in pairwise(steps):
            assert max(rank[n] for n in earlier) <= min(rank[n] for n in later) + slack


def test_who_comes_while_others_wait_is_still_put_in_order():
    """Only as many leave the queue as two steps compute."""
    limits = Limits(4000, 64, 500, prefill_tokens=PREFILL, shortest_first=True)
    scheduler = Scheduler(limits)

    def submit(number: int, tokens: int) -> None:
        stopping = StoppingParams(3, eos_token_ids=frozenset())
        scheduler.submit(Request([number], [number + 2] * tokens, SamplingParams(), stopping))

    for number in range(20):
        submit(number, 20)
    step = scheduler.plan(0)
    assert step is not None
    assert scheduler.load().running == 2
    submit(20, 2)
    begun: list[int] = []
    while step is not None:
        settled = scheduler.settle(step, [1] * step.plan.sampling, 0)
        begun += [started.sequence_id for started in settled.started]
        step = scheduler.plan(0)
    assert begun.index(20) <= 3
    assert sorted(begun) == [*range(21)]
