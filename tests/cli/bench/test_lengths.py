"""Lengths: what is written is what is drawn."""

from __future__ import annotations

import numpy as np
import pytest

from tokenpod_client.cli.bench.prompts import LogNormal, Uniform, parse_lengths


def draws(lengths, count=4000):
    random = np.random.default_rng(1)
    return np.array([lengths.draw(random) for _ in range(count)])


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("128", Uniform(128, 128)),
        ("uniform:16:256", Uniform(16, 256)),
        ("lognormal:180:0.9:2048", LogNormal(180, 0.9, 2048)),
    ],
)
def test_each_form_is_read(text, lengths):
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "write N"),
        ("x", "write N"),
        ("1.5", "write N"),
        ("0", "at least 1 token"),
        ("-3", "at least 1 token"),
        ("uniform:1", "write N"),
        ("uniform:9:2", "1 <= LOW <= HIGH"),
        ("uniform:0:2", "1 <= LOW <= HIGH"),
        ("lognormal:5:0.5:4", "1 <= MEDIAN <= MAX"),
        ("lognormal:5:-1:9", "SIGMA >= 0"),
        ("lognormal:5:nan:9", "SIGMA >= 0"),
        ("gamma:1:2", "write N"),
    ],
)
def test_what_is_no_length_is_quoted_with_what_would_be(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        parse_lengths(text)
    assert repr(text) in str(caught.value)


def test_a_number_is_always_the_same():
    assert set(draws(parse_lengths("7"))) == {7}


def test_uniform_draws_both_ends_and_nothing_beyond():
    assert set(draws(Uniform(3, 6))) == {3, 4, 5, 6}


def test_lognormal_has_its_median_and_its_deviation():
    drawn = draws(LogNormal(200, 0.5, 100_000))
    assert np.median(drawn) == pytest.approx(200, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.05)


def test_lognormal_stays_within_1_and_its_longest():
    drawn = draws(LogNormal(10, 300.0, 64))
    assert drawn.min() == 1
    assert drawn.max() == 64
