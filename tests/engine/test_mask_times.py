"""What time the clock counts against a mask."""

from __future__ import annotations

import threading

from support.engines.constrained import TOKENS, VOCABULARY, Clock, ask
from tokenpod.core.constraints import ConstraintLimits, Regex
from tokenpod.engine.constraints.guidance import Guidance, GuidanceMatcher
from tokenpod.engine.constraints.masks import Masks


class Pausing(Clock):
    """Holds up a worker that asks for the time, as a machine may that takes its core away."""

    def __init__(self):
        super().__init__()
        self.going_on = threading.Event()
        self.going_on.set()

    def __call__(self):
        if threading.current_thread().name.startswith("constraints-fast"):
            assert self.going_on.wait(60)
        return super().__call__()


def test_a_mask_is_not_late_by_what_passed_since_the_one_before_it(monkeypatch):
    clock, made = Pausing(), threading.Semaphore(0)
    fill = GuidanceMatcher.fill

    def pause_behind(matcher, words):
        clock.going_on.clear()
        ends = fill(matcher, words)
        made.release()
        return ends

    masks = Masks(Guidance, VOCABULARY, ConstraintLimits(workers=1, mask_seconds=0.5), clock)
    masks.learn(TOKENS)
    masks.begin(ask(1, Regex("[ab]{9}")))
    while 1 not in masks:
        assert not masks.failures()
    monkeypatch.setattr(GuidanceMatcher, "fill", pause_behind)
    a = TOKENS.tokens.index(b"a")
    masks.took({1: [a]})
    assert made.acquire(timeout=60)
    while not masks.is_ready(1):
        pass
    # The worker has handed a mask over, and does not get to anything else.
    masks.took({1: [a]})
    assert not masks.is_ready(1)
    clock.now += 10**9
    assert not masks.over([1])
    # It gets to the next one, and takes a second for it.
    clock.going_on.set()
    monkeypatch.setattr(GuidanceMatcher, "fill", fill)
    while not masks.is_ready(1):
        pass
    assert not masks.over([1])
