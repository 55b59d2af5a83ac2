"""From options to a plan: what wins over what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.messages import Level, Load
from tokenpod_client.cli.bench.prompts import Prompts, Text, Uniform
from tokenpod_client.cli.bench.setup import make_plan
from tokenpod_client.cli.connection import Remote

INPUT, OUTPUT = Uniform(128, 128), Uniform(64, 64)
WORKLOAD = {
    "token_low": 10,
    "token_high": 128,
    "cases": [
        {"name": "one", "seed": 11, "concurrency": 1, "requests": [[8, 4]] * 3},
        {"name": "all", "concurrency": 0, "requests": [[8, 4], [9, 5]]},
        {"name": "timed", "rate_per_s": 4, "requests": [{"prompt": 1, "output": 2, "at": 0}]},
        {"name": "poisson", "rate_per_s": 4, "requests": [[1, 2]]},
    ],
}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


REMOTES = [Remote(address=name, token="secret") for name in ("h:1", "h:2")]


def setup(**options):
    return make_plan(
        REMOTES,
        BenchOptions(**options),
    )


def loads(**options):
    return [level.load for level in levels(**options)]


def levels(**options):
    """The levels after the warm-up."""
    return [level for level in setup(**options).levels if level.number]


def test_defaults_are_a_small_closed_loop():
    found = setup()
    warmup = Level(0, Load("closed", 4), 4, None)
    assert found.levels == [warmup, Level(1, Load("closed", 8), 64, None)]
    assert found.prompts == Prompts(Uniform(128, 128), Uniform(64, 64), (10, 1000))
    assert found.remotes == [
        Remote(address="h:1", token="secret"),
        Remote(address="h:2", token="secret"),
    ]
    assert found.ignore_eos


def test_without_a_seed_one_is_drawn():
    assert len({setup().seed for _ in range(4)}) > 1
    assert setup(seed=5).seed == 5


def test_several_loads_are_levels_of_their_own():
    found = levels(concurrency="1,2,4", requests=3)
    assert [(level.number, level.load) for level in found] == [
        (1, Load("closed", 1)),
        (2, Load("closed", 2)),
        (3, Load("closed", 4)),
    ]


def test_a_rate_is_an_open_loop_that_concurrency_caps():
    assert loads(request_rate="1,2.5", burstiness=0.5) == [
        Load("open", None, 1.0, 0.5),
        Load("open", None, 2.5, 0.5),
    ]
    assert loads(request_rate="1", concurrency="4") == [Load("open", 4, 1.0, 1.0)]
    assert loads(request_rate="inf") == [Load("open", None, None, 1.0)]


def test_a_duration_needs_no_number_of_requests():
    assert levels(duration=3.0) == [Level(1, Load("closed", 8), None, 3.0)]
    assert levels(duration=3.0, requests=9) == [Level(1, Load("closed", 8), 9, 3.0)]


def test_all_at_once_is_a_number_of_requests_whatever_the_duration():
    for concurrency in (None, "4"):
        (level,) = levels(request_rate="inf", duration=3.0, concurrency=concurrency)
        assert level.requests == 64


def test_a_case_brings_lengths_seed_tokens_and_load(workload):
    found = setup(workload=workload, case="one")
    assert found.prompts == Prompts(INPUT, OUTPUT, (10, 128), pairs=((8, 4),) * 3)
    assert found.seed == 11
    assert found.levels[1:] == [Level(1, Load("closed", 1), 3, None)]
    assert loads(workload=workload, case="all") == [Load("open", None, None, 1.0)]
    assert loads(workload=workload, case="timed") == [Load("replay", None, 4)]
    assert loads(workload=workload, case="poisson") == [Load("open", None, 4, 1.0)]


def test_the_command_line_wins_over_the_case(workload):
    found = setup(workload=workload, case="one", seed=3, requests=9, token_range="1:5")
    assert (found.seed, found.levels[1].requests) == (3, 9)
    assert found.prompts.token_range == (1, 5)
    assert loads(workload=workload, case="timed", concurrency="2") == [Load("closed", 2)]
    assert loads(workload=workload, case="timed", request_rate="2") == [
        Load("open", None, 2.0, 1.0)
    ]


def test_a_file_of_one_case_needs_no_name(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"a": {"requests": [[1, 1]]}}))
    assert setup(workload=path).prompts == Prompts(INPUT, OUTPUT, pairs=((1, 1),))


def test_a_file_of_prompts_is_asked_once_each_and_may_end_early(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    found = setup(prompts=path, output_tokens="uniform:1:3")
    assert found.prompts == Prompts(INPUT, Uniform(1, 3), texts=(Text("one"), Text("two")))
    assert found.levels[1].requests == 2
    assert not found.ignore_eos
    assert setup(prompts=path, ignore_eos=True).ignore_eos


def test_no_warmup_is_no_level():
    assert [level.number for level in setup(warmup=0).levels] == [1]


@pytest.mark.parametrize(
    ("options", "hint", "problem"),
    [
        ({"concurrency": "x"}, "--concurrency", "is 'x'"),
        ({"concurrency": "1.5"}, "--concurrency", "whole numbers from 1"),
        ({"concurrency": "0"}, "--concurrency", "above 0"),
        ({"concurrency": "inf"}, "--concurrency", "above 0"),
        ({"request_rate": "1,,2"}, "--request-rate", "is '1,,2'"),
        ({"request_rate": "-1"}, "--request-rate", "above 0"),
        ({"request_rate": "nan"}, "--request-rate", "above 0"),
        ({"request_rate": "1", "concurrency": "1,2"}, "--concurrency", "can't be a list"),
        ({"burstiness": 0.0}, "--burstiness", "above 0"),
        ({"input_tokens": "0"}, "--input-tokens", "at least 1"),
        ({"output_tokens": "x"}, "--output-tokens", "is 'x'"),
        ({"burstiness": 0.5}, "--burstiness", "needs --request-rate"),
        ({"prefix_groups": 2}, "--prefix-groups", "needs --prefix-tokens"),
        ({"token_range": "5:5"}, "--token-range", "is '5:5'"),
        ({"token_range": "5"}, "--token-range", "LOW:HIGH"),
        ({"case": "one"}, "--case", "needs --workload"),
        ({"slo": "ttft=3"}, "--slo", "'ttft=3'"),
        ({"prompts": Path("/no/such")}, "--prompts", "can't be read"),
    ],
)
def test_what_cant_be_is_refused_with_the_option_that_says_it(options, hint, problem):
    with pytest.raises(click.BadParameter, match=problem) as caught:
        setup(**options)
    assert caught.value.param_hint == hint


def test_an_unknown_case_is_refused_with_the_known_ones(workload):
    with pytest.raises(click.BadParameter, match=r"is 'x': .* has one, all, timed, poisson"):
        setup(workload=workload, case="x")
    with pytest.raises(click.BadParameter, match="is needed: "):
        setup(workload=workload)


def test_a_file_of_prompts_goes_with_no_other_source(workload, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n")
    with pytest.raises(click.BadParameter, match="can't go with --workload"):
        setup(prompts=path, workload=workload, case="one")
    with pytest.raises(click.BadParameter, match="can't go with --prefix-tokens"):
        setup(prompts=path, prefix_tokens=4)
    with pytest.raises(click.BadParameter, match="can't go with --output-tokens"):
        setup(workload=workload, case="one", output_tokens="4")
