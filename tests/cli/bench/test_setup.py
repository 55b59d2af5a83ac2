"""From options to a plan: what wins over what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from tokenpod.cli.bench.arrivals import Closed, Open, Replay
from tokenpod.cli.bench.lengths import Fixed, Uniform
from tokenpod.cli.bench.messages import Level
from tokenpod.cli.bench.prompts import Drawn, Listed, Text, TextPrompts, TokenPrompts
from tokenpod.cli.bench.setup import BenchOptions, make_setup
from tokenpod.cli.remote import Remote

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


def setup(**options):
    return make_setup([Remote("h:1", "secret"), Remote("h:2", "secret")], BenchOptions(**options))


def loads(**options):
    return [level.load for level in setup(**options).levels]


def test_defaults_are_a_small_closed_loop():
    found = setup()
    assert found.levels == [Level(1, Closed(8), 64, None)]
    assert found.warmup == Level(0, Closed(4), 4, None)
    assert found.plan.prompts == TokenPrompts(Drawn(Fixed(128), Fixed(64)), 10, 1000)
    assert found.plan.target.addresses == ["h:1", "h:2"]
    assert found.plan.target.token == "secret"
    assert found.plan.sampling.ignore_eos


def test_without_a_seed_one_is_drawn():
    assert len({setup().plan.seed for _ in range(4)}) > 1
    assert setup(seed=5).plan.seed == 5


def test_several_loads_are_levels_of_their_own():
    levels = setup(concurrency="1,2,4", requests=3).levels
    assert [(level.number, level.load) for level in levels] == [
        (1, Closed(1)),
        (2, Closed(2)),
        (3, Closed(4)),
    ]


def test_a_rate_is_an_open_loop_that_concurrency_caps():
    assert loads(request_rate="1,2.5", burstiness=0.5) == [Open(1.0, 0.5), Open(2.5, 0.5)]
    assert loads(request_rate="1", concurrency="4") == [Open(1.0, 1.0, 4)]
    assert loads(request_rate="inf") == [Open(None)]


def test_a_duration_needs_no_number_of_requests():
    assert setup(duration=3.0).levels == [Level(1, Closed(8), None, 3.0)]
    assert setup(duration=3.0, requests=9).levels == [Level(1, Closed(8), 9, 3.0)]


def test_all_at_once_is_a_number_of_requests_whatever_the_duration():
    for concurrency in (None, "4"):
        (level,) = setup(request_rate="inf", duration=3.0, concurrency=concurrency).levels
        assert level.requests == 64


def test_a_case_brings_lengths_seed_tokens_and_load(workload):
    found = setup(workload=workload, case="one")
    assert found.plan.prompts == TokenPrompts(Listed([(8, 4)] * 3), 10, 128)
    assert found.plan.seed == 11
    assert found.levels == [Level(1, Closed(1), 3, None)]
    assert loads(workload=workload, case="all") == [Open(None)]
    assert loads(workload=workload, case="timed") == [Replay(4)]
    assert loads(workload=workload, case="poisson") == [Open(4)]


def test_the_command_line_wins_over_the_case(workload):
    found = setup(workload=workload, case="one", seed=3, requests=9, token_range="1:5")
    assert (found.plan.seed, found.levels[0].requests) == (3, 9)
    assert (found.plan.prompts.low, found.plan.prompts.high) == (1, 5)
    assert loads(workload=workload, case="timed", concurrency="2") == [Closed(2)]
    assert loads(workload=workload, case="timed", request_rate="2") == [Open(2.0)]


def test_a_file_of_one_case_needs_no_name(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"a": {"requests": [[1, 1]]}}))
    assert setup(workload=path).plan.prompts == TokenPrompts(Listed([(1, 1)]), 10, 1000)


def test_a_file_of_prompts_is_asked_once_each_and_may_end_early(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    found = setup(prompts=path, output_tokens="uniform:1:3")
    assert found.plan.prompts == TextPrompts([Text("one"), Text("two")], Uniform(1, 3))
    assert found.levels[0].requests == 2
    assert not found.plan.sampling.ignore_eos
    assert found.prefix_tokens is None
    assert setup(prompts=path, ignore_eos=True).plan.sampling.ignore_eos


def test_no_warmup_is_no_level():
    assert setup(warmup=0).warmup is None


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
    with pytest.raises(typer.BadParameter, match=problem) as caught:
        setup(**options)
    assert caught.value.param_hint == hint


def test_an_unknown_case_is_refused_with_the_known_ones(workload):
    with pytest.raises(typer.BadParameter, match=r"is 'x': .* has one, all, timed, poisson"):
        setup(workload=workload, case="x")
    with pytest.raises(typer.BadParameter, match="is needed: "):
        setup(workload=workload)


def test_a_file_of_prompts_goes_with_no_other_source(workload, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n")
    with pytest.raises(typer.BadParameter, match="can't go with --workload"):
        setup(prompts=path, workload=workload, case="one")
    with pytest.raises(typer.BadParameter, match="can't go with --prefix-tokens"):
        setup(prompts=path, prefix_tokens=4)
    with pytest.raises(typer.BadParameter, match="can't go with --output-tokens"):
        setup(workload=workload, case="one", output_tokens="4")
