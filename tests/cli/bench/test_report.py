"""The report: what is counted, over what, and what it warns of."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tokenpod_client.cli.bench.figures import ARRIVAL, Record
from tokenpod_client.cli.bench.flags import BenchOptions
from tokenpod_client.cli.bench.fleet import Measured
from tokenpod_client.cli.bench.messages import Level, Load, Outcome, Plan
from tokenpod_client.cli.bench.prompts import Prompts, Text, Uniform
from tokenpod_client.cli.bench.report import LevelReport, Report, section
from tokenpod_client.cli.bench.screen import print_sweep
from tokenpod_client.cli.connection import Remote

PAGE = Path(__file__).resolve().parents[3] / "docs" / "benchmarking.md"


def request(index, *, first=1.0, ended=2.0, code="OK", **more):
    """A request due at 0 with 2 tokens in 2 messages."""
    fields = {
        "index": index,
        "target": 0,
        "due": 0.0,
        "sent": 0.0,
        "ended": ended,
        "code": code,
        "detail": "" if code == "OK" else "no\n  room",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "queue_s": 0.25,
        "first_token_s": 0.5,
        "stream": bytearray(ARRIVAL.pack(first, 1, 0) + ARRIVAL.pack(ended, 1, 0)),
    }
    return Record(**(fields | more))


NONE = {"stream": bytearray()}


def report(*records, load=None, clients=None, lags=(), bounds=None, prefix_tokens=0, addresses=1):
    level = Level(1, load or Load("closed", 2), len(records), None)
    first, *others = clients or [(0.1, 2.0)]
    outcomes = [Outcome(list(records), *first, list(lags))]
    outcomes += [Outcome([], *other, []) for other in others]
    texts = (Text("x"),) if prefix_tokens is None else ()
    prompts = Prompts(Uniform(8, 8), Uniform(2, 2), prefix_tokens=prefix_tokens or 0, texts=texts)
    remotes = [Remote(address=f"host:{i}") for i in range(addresses)]
    plan = Plan(remotes, BenchOptions(), prompts, 1, True, [level], bounds or {})
    return section(LevelReport, Measured(plan, level, outcomes))


def test_rates_are_of_what_succeeded_over_the_whole_level():
    found = report(request(0), request(1, ended=4.0), request(2, ended=5.0, code="CANCELLED"))
    assert found.duration_s == 5.0
    assert found.throughput.requests_per_s == pytest.approx(2 / 5)
    assert found.throughput.output_tokens_per_s == pytest.approx(4 / 5)
    assert found.throughput.total_tokens_per_s == pytest.approx(24 / 5)


def test_failed_requests_are_counted_by_code_and_stay_out_of_latencies():
    found = report(
        request(0),
        request(1, first=99.0, ended=100.0, code="DEADLINE_EXCEEDED"),
        request(2, code="RESOURCE_EXHAUSTED", ended=0.1, **NONE),
        request(3, code="RESOURCE_EXHAUSTED", ended=0.2, **NONE),
    )
    assert (found.requests.sent, found.requests.succeeded, found.requests.failed) == (4, 1, 3)
    assert found.requests.errors == {"RESOURCE_EXHAUSTED": 2, "DEADLINE_EXCEEDED": 1}
    assert found.requests.first_error == "RESOURCE_EXHAUSTED: no room"
    assert (found.tokens.output, found.tokens.of_failed) == (2, 2)
    assert found.latency_s.ttft.max == 1.0
    assert found.latency_s.e2e.count == found.server_s.queue.count == 1


def test_goodput_counts_requests_that_succeeded_within_every_bound():
    late = request(1, first=1.5, ended=2.0)
    failed = request(2, code="CANCELLED")
    found = report(request(0), late, failed, request(3), bounds={"ttft": 1.2})
    assert (found.goodput.requests, found.goodput.share) == (2, 0.5)
    assert found.goodput.requests_per_s == pytest.approx(2 / 2.0)
    assert found.goodput.bounds_s == {"ttft": 1.2}


def test_without_bounds_there_is_no_goodput():
    assert report(request(0)).goodput is None


def test_the_offered_rate_is_that_of_what_was_due():
    due = [request(i, due=i * 0.5) for i in range(1, 5)]
    assert report(*due, load=Load("open", None, 3.0, 1.0)).requests.offered_per_s == 2.0
    assert report(*due, load=Load("closed", 1)).requests.offered_per_s is None
    assert report(request(0), load=Load("open", None, None, 1.0)).requests.offered_per_s is None


def test_the_wait_for_a_client_is_told():
    found = report(request(0, sent=0.5), request(1))
    assert found.clients.send_lag_s.max == 0.5


def test_each_server_has_its_share():
    found = report(request(0), request(1, target=1), request(2, code="UNKNOWN"), addresses=2)
    assert [(t.address, t.sent, t.succeeded) for t in found.targets] == [
        ("host:0", 2, 1),
        ("host:1", 1, 1),
    ]


@pytest.mark.parametrize(
    ("load", "shape"),
    [
        (Load("closed", 4), ("closed", 4, None, None)),
        (Load("open", 9, 2.0, 0.5), ("open", 9, 2.0, 0.5)),
        (Load("open", None, None, 1.0), ("open", None, None, 1.0)),
        (Load("replay", None, 3.0), ("replay", None, 3.0, None)),
    ],
)
def test_the_load_is_told_in_flat_fields(load, shape):
    names = ("mode", "concurrency", "request_rate", "burstiness")
    told = msgspec.to_builtins(report(request(0), load=load))["load"]
    assert told == dict(zip(names, shape, strict=True))


def test_a_level_without_requests_is_all_zero():
    found = report(bounds={"ttft": 1.0})
    assert (found.duration_s, found.throughput.output_tokens_per_s) == (0.0, 0.0)
    assert (found.goodput.share, found.tokens.per_message) == (0.0, None)


def test_a_calm_client_is_no_warning():
    assert report(request(0), lags=[0.001] * 100).warnings == []


def test_a_busy_client_process_is_a_warning():
    (warning,) = report(request(0), clients=[(0.1, 2.0), (1.9, 2.0)]).warnings
    assert "busy for 95%" in warning


def test_a_late_event_loop_is_a_warning():
    (warning,) = report(request(0), lags=[0.0] * 98 + [0.02] * 2).warnings
    assert "20 ms late" in warning


def test_prompts_that_the_server_knew_are_a_warning_unless_they_were_to_be_shared():
    known = [request(i, cached_tokens=8) for i in range(4)]
    (warning,) = report(*known, prefix_tokens=0).warnings
    assert "80% of the prompts' tokens were cached" in warning
    assert report(*known, prefix_tokens=8).warnings == []
    assert report(*known, prefix_tokens=None).warnings == []


def test_what_the_server_did_not_measure_is_left_out():
    found = report(request(0, queue_s=math.nan, first_token_s=math.nan))
    assert (found.server_s.queue.count, found.server_s.ttft.count) == (0, 0)


def test_the_table_of_all_loads_fits_80_columns():
    slow = [request(i, due=i * 0.01, first=2.0 + i * 0.01, ended=99.0) for i in range(300)]
    levels = [
        report(*slow, load=Load("open", None, 16.0, 1.0), bounds={"ttft": 999.0}),
        report(request(0, code="CANCELLED"), load=Load("open", None, None, 1.0)),
    ]
    out = io.StringIO()
    print_sweep(Console(file=out, width=80), levels)
    title, *lines = out.getvalue().strip().splitlines()
    assert title.startswith("all loads")
    assert len(lines) == 4
    assert "…" not in out.getvalue()
    assert lines[2].split()[:7] == ["16", "requests/s", "100", "3.03", "6.06", "2,000", "2,000"]
    assert lines[3].split()[-2:] == ["-", "1"]


def test_every_field_of_the_json_is_in_its_page():
    page = PAGE.read_text()
    structs = msgspec.json.schema(Report)["$defs"].values()
    fields = {name for struct in structs for name in struct["properties"]}
    assert {"schema_version", "ttft", "loop_lag_s"} <= fields
    assert {name for name in fields if f"`{name}`" not in page} - {"levels", "targets"} <= {
        name for name in fields if f"`.{name}`" in page or f"`.{name}[]`" in page
    }
