"""Workload files: both forms are read, and what is wrong is named by its place."""

from __future__ import annotations

import json

import pytest

from tokenpod_client.cli.bench.files import Case, read_cases


def test_a_list_of_cases_is_read():
    data = {
        "note": "ignored",
        "token_low": 10,
        "token_high": 128,
        "cases": [
            {"name": "one", "seed": 11, "concurrency": 1, "what": "ignored", "requests": [[8, 4]]},
            {"name": "all", "seed": 22, "concurrency": 0, "requests": [[8, 4], [9, 5]]},
        ],
    }
    assert read_cases(json.dumps(data)) == {
        "one": Case(((8, 4),), (), None, 1, 11, (10, 128)),
        "all": Case(((8, 4), (9, 5)), (), None, 0, 22, (10, 128)),
    }


def test_a_case_a_key_is_read():
    data = {
        "note": "ignored",
        "a": {"repeats": 5, "requests": [{"prompt": 64, "output": 32}]},
        "d": {
            "rate_per_s": 2.5,
            "requests": [{"prompt": 8, "output": 4, "at": 0}, {"prompt": 9, "output": 5, "at": 2}],
        },
    }
    assert read_cases(json.dumps(data)) == {
        "a": Case(((64, 32),)),
        "d": Case(((8, 4), (9, 5)), (0, 2), 2.5),
    }


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "must be a JSON object"),
        ({}, "has no cases"),
        ({"cases": 3}, "cases must be a list"),
        ({"cases": [{}]}, r"cases\[0\] must be an object with a name"),
        ({"a": {"requests": []}}, "a.requests must be a list that is not empty"),
        ({"a": {"requests": [[1, 2], [3]]}}, r"a.requests\[1\] is \[3\]: write"),
        ({"a": {"requests": [[0, 2]]}}, r"a.requests\[0\] is \[0, 2\]: .* at least 1 token"),
        ({"a": {"requests": [[1, True]]}}, "at least 1 token"),
        ({"a": {"requests": [{"prompt": 1}]}}, "at least 1 token"),
        ({"a": {"requests": [{"prompt": 1, "output": 1, "at": -1}]}}, r"at is -1: must be"),
        ({"a": {"requests": [{"prompt": 1, "output": 1, "at": 1}, [1, 1]]}}, "or none"),
        (
            {
                "a": {
                    "requests": [
                        {"prompt": 1, "output": 1, "at": 1},
                        {"prompt": 1, "output": 1, "at": 0},
                    ]
                }
            },
            "must not decrease",
        ),
        ({"a": {"requests": [[1, 1]], "rate_per_s": 0}}, "a.rate_per_s is 0: .* above 0"),
        ({"a": {"requests": [[1, 1]], "concurrency": -1}}, "a.concurrency is -1: .* from 0"),
        ({"token_low": 5, "a": {"requests": [[1, 1]]}}, "go together"),
        ({"token_low": 5, "token_high": 5, "a": {"requests": [[1, 1]]}}, "below token_high, 5"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data, problem):
    with pytest.raises(ValueError, match=problem):
        read_cases(json.dumps(data))


def test_what_is_not_json_is_told_with_its_line():
    with pytest.raises(ValueError, match=r"is not JSON: .*line 2"):
        read_cases("{\n")
