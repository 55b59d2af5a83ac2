"""Every planner fills the same step: what executors have room for is counted once for all."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from support.engines.scheduler_driver import Driver, Guesses, request
from tokenpod.core.capacity import MOST_DRAFTS, step_limits
from tokenpod.core.constraints import Regex
from tokenpod.core.messages import PROBE_TOKENS, EngineOptions
from tokenpod.core.plan import PlanRow, plan_of
from tokenpod.core.step_limits import StepLimits
from tokenpod.scheduler.drafts.drafting import Drafting
from tokenpod.scheduler.sequences.work import Limits


class Always(Guesses):
    """As many guesses as may be."""

    def find(self, sequence, most):
        return [1] * most


def two_routers_and_streams(drafts, *, rows, streams):
    """A driver with two routers' batches of so many rows each, and streams, that all decode.

    Decode calls of both routers are there before its next step.
    """
    drafting = partial(Drafting, Always(1), drafts)
    driver = Driver(slots=9000, max_rows=70, prefill_tokens=400, drafting=drafting)
    batches = [[100 * op + i for i in range(rows)] for op in (1, 2)]
    for op, batch in enumerate(batches, 1):
        new = [request(i, [i, 1], max_new_tokens=60, drafts=drafts) for i in batch]
        assert driver.advance(op, new) is None
    for i in range(streams):
        driver.submit(request(1 + i, [i, 1], max_new_tokens=60, drafts=drafts))
    driver.turn()
    for op, batch in enumerate(batches, 3):
        assert driver.advance(op, resume=batch) is None
    return driver


def test_drafts_of_two_routers_and_of_streams_share_a_step():
    driver = two_routers_and_streams(8, rows=30, streams=4)
    driver.turn()
    plan = driver.last_step.plan
    assert plan.drafts == MOST_DRAFTS
    assert plan.rows == 64
    driver.drain()


def test_forced_tokens_of_two_routers_and_of_streams_share_the_free_rows():
    driver = Driver(slots=9000, max_rows=12, prefill_tokens=200, forced=8)
    constraint = Regex("a+")
    for op, batch in ((1, (10, 11)), (2, (20, 21))):
        new = [
            request(i, [i, 1], max_new_tokens=30, drafts=8, constraint=constraint) for i in batch
        ]
        driver.advance(op, new)
        driver.scheduler.masked(batch)
    driver.submit(request(1, [1, 1], max_new_tokens=30, constraint=constraint))
    driver.scheduler.masked([1])
    driver.turn()
    driver.advance(3, resume=[10, 11])
    driver.advance(4, resume=[20, 21])
    driver.scheduler.forced.known = {
        i: (1, [driver.executor.choose(i, n) for n in range(1, 9)]) for i in (1, 10, 11, 20, 21)
    }
    driver.turn()
    plan = driver.last_step.plan
    assert plan.rows == 5
    assert plan.drafts == 12 - 5
    driver.scheduler.forced.known = {}
    driver.drain()


def test_a_step_beyond_what_executors_have_room_for_is_not_closed():
    """In production, too: whatever a planner adds, the plan is held to the executor's buffers."""
    limits = StepLimits(rows=3, prompt=4, drafts=2)
    fits = [
        PlanRow(0, 5, [1, 2, 3], [1, 1, 1], samples=3),
        PlanRow(1, 0, [4, 5], [1, 1], samples=0),
    ]
    limits.check(plan_of(1, fits))
    for name, rows in (
        ("4 rows", [PlanRow(i, 1, [i]) for i in range(4)]),
        ("10 tokens", [PlanRow(0, 0, range(10), [1] * 10)]),
        ("3 drafts", [PlanRow(0, 1, range(4), [1] * 4, samples=4)]),
        ("3 drafts", [PlanRow(i, 1, [2 * i, 2 * i + 1], [1, 1], samples=2) for i in range(3)]),
    ):
        with pytest.raises(AssertionError, match=f"a step of {name}; executors have room for"):
            limits.check(plan_of(1, rows))


def test_a_planner_that_adds_too_much_is_found_when_the_step_is_closed(monkeypatch):
    driver = two_routers_and_streams(8, rows=30, streams=4)
    step = StepLimits(rows=71, prompt=400 + PROBE_TOKENS, drafts=100)
    driver.scheduler._step_limits = step
    driver.turn()
    assert driver.last_step.plan.drafts == 100
    monkeypatch.setattr(Drafting, "add_to", greedy)
    for op, batch in enumerate((range(100, 130), range(200, 230)), 5):
        driver.advance(op, resume=[*batch])
    with pytest.raises(AssertionError, match=r"a step of \d+ drafts; executors have room for 100"):
        driver.turn()


def greedy(self, step, sequences, places):
    """As `Drafting.add_to`, whatever there is room for."""
    for sequence in sequences:
        step.draft(sequence, [1] * 5)
    return [], np.empty(0, np.int64), 6 * len(sequences)


@pytest.mark.parametrize(("speculate", "rows", "drafts"), [(8, 64, 256), (2, 4, 8)])
def test_the_scheduler_holds_steps_to_the_buffers_that_the_engine_makes(speculate, rows, drafts):
    options = EngineOptions(
        "",
        None,
        "cpu",
        threads=1,
        max_batch_size=rows,
        max_batch_prefill_tokens=100,
        speculate=speculate,
    )
    made = step_limits(options)
    limits = Limits(1000, rows, 100, options.max_batch_prefill_tokens, drafts=made.drafts)
    assert limits.step == made
    assert made.drafts == drafts
