"""Arrivals: processes have the rate and the shape they are named for, and split without a rest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tokenpod_client.cli.bench.fleet import divide
from tokenpod_client.cli.bench.messages import Begin, Level, Load
from tokenpod_client.cli.bench.worker import arrival_times


def gaps(load, count=20_000):
    times = list(itertools.islice(arrival_times(load, np.random.default_rng(3)), count))
    assert times == sorted(times)
    return np.diff([0.0, *times])


def test_poisson_arrivals_have_exponential_gaps():
    found = gaps(Load("open", None, 4.0, 1.0))
    assert found.mean() == pytest.approx(0.25, rel=0.03)
    assert found.std() == pytest.approx(0.25, rel=0.03)
    assert (found > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 9.0])
def test_burstiness_changes_how_even_gaps_are_and_not_the_rate(burstiness):
    found = gaps(Load("open", None, 4.0, burstiness))
    assert found.mean() == pytest.approx(0.25, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_all_at_once_is_due_at_the_start():
    assert not gaps(Load("open", None, None, 1.0), 5).any()


def test_the_same_seed_gives_the_same_times():
    assert (gaps(Load("open", None, 2.0, 1.0), 50) == gaps(Load("open", None, 2.0, 1.0), 50)).all()


def test_replay_is_scaled_by_its_rate_and_begins_again():
    times = arrival_times(Load("replay", None, 2.0), np.random.default_rng(0), (0.0, 3.0, 4.0))
    assert list(itertools.islice(times, 5)) == [0.0, 1.5, 2.0, 2.5, 4.0]


@pytest.mark.parametrize(
    "load",
    [
        Load("closed", 1),
        Load("closed", 5),
        Load("open", None, 1.0, 1.0),
        Load("open", 3, 1.0, 1.0),
        Load("replay", None, 1.0),
    ],
)
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_send_every_request_once_and_have_every_slot_once(load, processes):
    at_work = divide(Level(1, load, 40), processes)
    assert len(at_work) <= processes
    sent = sorted(i for own in at_work for i in range(own.first, 40, own.step))
    assert sent == list(range(40))
    slots = load.concurrency
    if slots is None:
        assert all(own.slots is None for own in at_work)
    else:
        assert sum(own.slots for own in at_work) == slots
        assert all(own.slots for own in at_work)


def test_a_process_without_a_slot_sends_nothing():
    level = Level(1, Load("closed", 2), 9)
    assert divide(level, 4) == [Begin(level, 0, 2, 1), Begin(level, 1, 2, 1)]


def test_loads_are_named_as_one_would_say_them():
    names = [
        load.name
        for load in (
            Load("closed", 8),
            Load("open", None, 2.5, 1.0),
            Load("open", None, None, 1.0),
            Load("replay", None, 12.0),
        )
    ]
    assert names == ["8 at a time", "2.5 requests/s", "all at once", "12 requests/s"]
