"""What a prompt takes at the least, and who is dropped because of it."""

from __future__ import annotations

import itertools
import random

import pytest

from support.engines.scheduler_driver import Driver, request
from tokenpod.scheduler.steps.estimates import PromptTimes

MS = 1_000_000


def paced(*steps: tuple[int, int], prefill_tokens: int = 64) -> PromptTimes:
    """A pace that has seen each (prompt tokens, milliseconds) often enough."""
    pace = PromptTimes(prefill_tokens)
    for tokens, took in steps:
        for _ in range(16):
            pace.note(tokens, took * MS)
    return pace


def test_nothing_is_said_of_what_was_not_measured_often_enough():
    pace = PromptTimes(64)
    for _ in range(15):
        pace.note(64, 10 * MS)
    assert pace.least(1000) == 0
    pace.note(64, 10 * MS)
    assert pace.least(128) > 0


def test_whole_steps_count_half_of_the_fastest_one_each():
    pace = paced((64, 10), (64, 7), (64, 12))
    # 64 is the largest step there is.
    assert pace.least(5 * 64) == 5 * 7 * MS // 2


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (2, 0), (3, 0), (31, 3), (63, 3)])
def test_the_rest_counts_as_the_slowest_of_the_sizes_below_it(tokens, expected):
    pace = paced((16, 6), (4, 1), (20, 7))
    assert pace.least(tokens) == expected * MS


def test_a_small_step_says_nothing_of_a_larger_one_but_that_it_takes_no_less():
    # Sixteen of ten tokens at 10 ms do not make a prompt of 1000 tokens take a second.
    assert paced((10, 10), prefill_tokens=1024).least(1000) == 5 * MS


def test_what_was_long_ago_is_forgotten():
    pace = paced((64, 1))
    for _ in range(200):
        pace.note(64, 20 * MS)
    assert pace.least(64) == 10 * MS
    for _ in range(16):
        pace.note(64, 5 * MS)
    assert pace.least(64) == 5 * MS // 2


def test_steps_without_prompt_tokens_do_not_count():
    pace = PromptTimes(64)
    for _ in range(100):
        pace.note(0, 50 * MS)
    assert pace.least(640) == 0


def test_more_tokens_never_take_less():
    chance = random.Random(0)
    pace = PromptTimes(50)
    for _ in range(3000):
        pace.note(chance.randint(1, 50), chance.randint(1, 100) * MS)
    least = [pace.least(tokens) for tokens in range(400)]
    assert all(later >= sooner for sooner, later in itertools.pairwise(least[:50]))
    assert all(least[n + 50] >= least[n] for n in range(350))


# -- in the driver ------------------------------------------------------------------------------


def busy_driver(**limits) -> Driver:
    """A driver where every step of 8 prompt tokens has taken 100."""
    driver = Driver(**{"slots": 400, "max_rows": 8, "prefill_tokens": 8, "overlap": True} | limits)
    driver.submit(request(1000, [9] * 200, max_new_tokens=1))
    while driver.turn():
        driver.now += 100
    return driver


def drop_times(driver: Driver) -> list[str]:
    return [driver.sequences[i].ended for i in sorted(driver.sequences) if i < 1000]


def test_a_deadline_that_the_prompt_alone_outlasts_is_refused_at_once():
    driver = busy_driver()
    # Five steps: 250 at the least, by the careful half.
    driver.submit(request(1, list(range(40)), deadline_at=driver.now + 240))
    driver.submit(request(2, list(range(100, 140)), deadline_at=driver.now + 260))
    steps = driver.steps
    driver.turn()
    assert drop_times(driver) == ["failure DEADLINE_EXCEEDED", ""]
    assert driver.planned() == {2: 8}
    assert driver.steps == steps + 1
    driver.abort(2)
    driver.drain()


def test_a_prompt_that_falls_behind_is_dropped_between_its_pieces():
    driver = busy_driver()
    driver.submit(request(1, list(range(40)), deadline_at=driver.now + 400))
    for _ in range(3):
        driver.turn()
        driver.now += 150
    # Two pieces are left: 100 at the least, and 50 to go... one turn later it is plain.
    driver.turn()
    assert drop_times(driver) == ["failure DEADLINE_EXCEEDED"]
    driver.drain()


def test_what_the_cache_holds_needs_no_time():
    driver = busy_driver()
    driver.submit(request(1, [9] * 200, deadline_at=driver.now + 60, max_new_tokens=1))
    driver.submit(request(2, [8] * 200, deadline_at=driver.now + 60, max_new_tokens=1))
    driver.run()
    assert drop_times(driver) == ["finish", "failure DEADLINE_EXCEEDED"]
    driver.drain()


def test_all_samples_of_a_request_are_dropped_together():
    driver = busy_driver()
    driver.submit(request([1, 2, 3], list(range(40)), deadline_at=driver.now + 100))
    driver.turn()
    assert drop_times(driver) == ["failure DEADLINE_EXCEEDED"] * 3
    driver.drain()


def test_a_fresh_server_drops_nothing_before_its_deadline():
    driver = Driver(slots=400, max_rows=8, prefill_tokens=8)
    driver.submit(request(1, list(range(160)), deadline_at=10, max_new_tokens=1))
    driver.run()
    assert drop_times(driver) == ["finish"]
