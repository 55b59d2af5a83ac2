"""Figures of one request, percentiles of many, and bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenpod_client.cli.bench.figures import ARRIVAL, Record, spread, within
from tokenpod_client.cli.bench.setup import parse_bounds


def record(messages=(), *, due=0.0, ended=1.0, code="OK", index=0, **more):
    """A record of messages as (time, tokens, sample)."""
    fields = {
        "index": index,
        "target": 0,
        "due": due,
        "sent": due,
        "ended": ended,
        "code": code,
        "detail": "",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "queue_s": math.nan,
        "first_token_s": math.nan,
        "stream": bytearray(b"".join(ARRIVAL.pack(*message) for message in messages)),
    }
    return Record(**(fields | more))


def test_latencies_of_a_stream():
    found = record([(3.0, 1, 0), (3.5, 1, 0), (4.5, 1, 0)], due=2.0, ended=5.0)
    assert (found.ttft, found.e2e, found.output_tokens) == (1.0, 3.0, 3)
    assert found.itl.tolist() == [0.5, 1.0]
    assert found.tpot.tolist() == [0.75]


def test_a_message_of_several_tokens_is_one_gap_and_counts_wholly_per_token():
    found = record([(1.0, 1, 0), (2.0, 4, 0)])
    assert found.itl.tolist() == [1.0]
    assert found.tpot.tolist() == [0.25]
    assert found.output_tokens == 5


def test_tokens_of_the_first_message_took_no_time_after_it():
    assert record([(1.0, 8, 0), (2.0, 1, 0)]).tpot.tolist() == [1.0]


def test_samples_have_gaps_of_their_own():
    found = record([(1.0, 1, 0), (1.1, 1, 1), (2.0, 1, 0), (3.1, 1, 1)])
    assert found.ttft == 1.0
    assert sorted(found.itl.round(9)) == [1.0, 2.0]
    assert sorted(found.tpot.round(9)) == [1.0, 2.0]


def test_a_request_without_tokens_has_an_end_alone():
    found = record(due=0.25, ended=1.0, code="RESOURCE_EXHAUSTED")
    assert math.isnan(found.ttft)
    assert (found.e2e, found.output_tokens) == (0.75, 0)
    assert not len(found.itl)
    assert not len(found.tpot)


def test_one_message_has_no_pace():
    assert not len(record([(1.0, 3, 0)]).tpot)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    st.sampled_from([("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)]),
)
def test_a_percentile_was_observed_and_divides_as_it_says(values, percentile):
    name, share = percentile
    found = getattr(spread(values), name)
    assert found in values
    assert (np.array(values) <= found).mean() >= share - 1e-9
    assert (np.array(values) < found).mean() < share


def test_a_spread_of_a_hundred_values():
    found = spread([float(i) for i in range(100, 0, -1)])
    assert (found.count, found.mean, found.max) == (100, 50.5, 100.0)
    assert (found.p50, found.p90, found.p95, found.p99) == (50.0, 90.0, 95.0, 99.0)


def test_a_spread_leaves_out_what_was_not_measured():
    assert spread([math.nan, 2.0]).count == 1
    nothing = spread([math.nan])
    assert (nothing.count, nothing.mean, nothing.p99, nothing.max) == (0, None, None, None)


def test_bounds_are_read_in_seconds():
    assert parse_bounds("ttft=200ms, itl=0.05s,e2e=3s") == {"ttft": 0.2, "itl": 0.05, "e2e": 3.0}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("ttft", "'ttft'"),
        ("latency=3s", "'latency=3s'"),
        ("ttft=1s,itl=50", "'itl=50'"),
        ("ttft=0ms", "'ttft=0ms'"),
        ("ttft=-1s", "'ttft=-1s'"),
        ("ttft=xms", "'ttft=xms'"),
        ("ttft=infs", "'ttft=infs'"),
    ],
)
def test_what_is_no_bound_is_quoted(text, part):
    with pytest.raises(ValueError, match=part):
        parse_bounds(text)


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({}, True),
        ({"ttft": 1.0, "itl": 1.0, "tpot": 0.75, "e2e": 3.0}, True),
        ({"ttft": 0.99}, False),
        ({"itl": 0.99}, False),
        ({"tpot": 0.74}, False),
        ({"e2e": 2.99}, False),
    ],
)
def test_every_bound_is_kept_or_the_request_is_not_good(bounds, kept):
    found = record([(3.0, 1, 0), (3.5, 1, 0), (4.5, 1, 0)], due=2.0, ended=5.0)
    assert within(bounds, found) is kept


def test_a_request_without_tokens_keeps_no_bound_on_its_first():
    assert not within({"ttft": 1e9}, record())
    assert within({"itl": 1e-9, "tpot": 1e-9}, record())
