"""Arrivals: processes have the rate and the shape they are named for, and split without a rest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tokenpod.cli.bench.arrivals import (
    Closed,
    Open,
    Replay,
    Share,
    arrival_times,
    label,
    share,
)


def gaps(load, count=20_000):
    times = list(itertools.islice(arrival_times(load, np.random.default_rng(3)), count))
    assert times == sorted(times)
    return np.diff([0.0, *times])


def test_poisson_arrivals_have_exponential_gaps():
    found = gaps(Open(rate=4.0))
    assert found.mean() == pytest.approx(0.25, rel=0.03)
    assert found.std() == pytest.approx(0.25, rel=0.03)
    assert (found > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 9.0])
def test_burstiness_changes_how_even_gaps_are_and_not_the_rate(burstiness):
    found = gaps(Open(rate=4.0, burstiness=burstiness))
    assert found.mean() == pytest.approx(0.25, rel=0.05)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_all_at_once_is_due_at_the_start():
    assert not gaps(Open(rate=None), 5).any()


def test_the_same_seed_gives_the_same_times():
    assert (gaps(Open(2.0), 50) == gaps(Open(2.0), 50)).all()


def test_replay_is_scaled_by_its_rate_and_begins_again():
    times = arrival_times(Replay(rate=2.0), np.random.default_rng(0), (0.0, 3.0, 4.0))
    assert list(itertools.islice(times, 5)) == [0.0, 1.5, 2.0, 2.5, 4.0]


@pytest.mark.parametrize("load", [Closed(1), Closed(5), Open(1.0), Open(1.0, most=3), Replay(1.0)])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_shares_hold_every_request_once_and_every_slot_once(load, processes):
    shares = [share(load, process, processes) for process in range(processes)]
    at_work = [own for own in shares if own]
    sent = sorted(i for own in at_work for i in range(own.first, 40, own.step))
    assert sent == list(range(40))
    slots = load.concurrency if isinstance(load, Closed) else load.most
    if slots is None:
        assert all(own.slots is None for own in at_work)
    else:
        assert sum(own.slots for own in at_work) == slots
        assert all(own.slots for own in at_work)


def test_a_process_without_a_slot_has_no_share():
    assert share(Closed(2), 1, 4) == Share(1, 2, 1)
    assert share(Closed(2), 2, 4) is None


def test_loads_are_named_as_one_would_say_them():
    names = [label(load) for load in (Closed(8), Open(2.5), Open(None), Replay(12.0))]
    assert names == ["8 at a time", "2.5 requests/s", "all at once", "12 requests/s"]
