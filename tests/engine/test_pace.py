"""What works beside the step loop works in slices, and sleeps while the loop works."""

from __future__ import annotations

from tokenpod.engine.adapters.pace import SLICE_SECONDS, Pace


class Time:
    """A clock that sleeping moves on, and tests set."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, 0.0
        self.on_sleep = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        self.on_sleep()


def paced() -> tuple[Pace, Time]:
    time = Time()
    pace = Pace(lambda: time.now, time.sleep)
    pace.rest()  # the first slice begins
    time.slept = 0.0
    return pace, time


def work(pace: Pace, time: Time, seconds: float) -> float:
    """Seconds of sleep behind so much work."""
    before = time.slept
    time.now += seconds
    pace.rest()
    return time.slept - before


def test_it_sleeps_once_a_slice():
    pace, time = paced()
    with pace:
        rests = [work(pace, time, SLICE_SECONDS / 4) for _ in range(12)]
    assert [bool(each) for each in rests] == [False, False, False, True] * 3


def test_it_sleeps_longer_while_the_loop_works():
    pace, time = paced()
    with pace:
        beside_one_that_waits = work(pace, time, SLICE_SECONDS)
    assert work(pace, time, SLICE_SECONDS) > 2 * beside_one_that_waits


def test_it_goes_on_when_the_loop_waits():
    pace, time = paced()
    with pace:
        pass
    time.on_sleep = pace.__enter__
    assert work(pace, time, SLICE_SECONDS) < SLICE_SECONDS


def test_a_loop_that_never_waits_does_not_keep_it_for_ever():
    pace, time = paced()
    with pace:
        pass
    assert 0 < work(pace, time, 100.0) < 0.01
