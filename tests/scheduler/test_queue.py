"""The queue finds whom it is asked for by place, however many wait."""

from __future__ import annotations

from support.engines.scheduler_driver import request
from tokenpod.scheduler.planners import queue
from tokenpod.scheduler.scheduler import Limits, Scheduler

ROWS, WAITING = 4, 1000


def test_a_call_that_ends_is_not_looked_for_among_all_that_wait(monkeypatch):
    scheduler = Scheduler(Limits(100_000, ROWS, 64, prefill_tokens=1000))
    for number in range(ROWS + WAITING):
        scheduler.submit(request(number, [1, 2, 3], max_new_tokens=8, priority=number % 3))
    step = scheduler.plan(0)
    assert scheduler.load().running == ROWS
    looked_at = []
    place = queue._place
    monkeypatch.setattr(queue, "_place", lambda entry: looked_at.append(entry) or place(entry))
    running = [sequence.id for sequence in step.sequences]
    scheduler.abort(running)
    waits = next(number for number in range(500, 600) if number not in running)
    scheduler.abort([waits])
    # A bisection each, and the neighbours of the place that was found.
    assert 0 < len(looked_at) <= (ROWS + 1) * 13
    assert scheduler.load().waiting == WAITING - 1
    scheduler.settle(step, [5] * len(step.sampled), 0)
    scheduler.check()
