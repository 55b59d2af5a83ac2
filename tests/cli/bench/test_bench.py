"""`tokenpod bench` as a whole, against a real server on the demo model."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.pods.harness import free_port
from support.waiting import wait_for
from tokenpod_client.cli.app import main
from tokenpod_client.cli.bench.report import SCHEMA_VERSION, Report

pytestmark = pytest.mark.pod

SMALL = ["--input-tokens", "8", "--output-tokens", "4", "--warmup", "1"]


@pytest.fixture
def bench(server, capsys, tmp_path):
    """Runs the command in this process; what it leaves: status, report or None, out, err."""

    def run(*arguments, address=None):
        file = tmp_path / "report.json"
        where = ["--address", address or server.address, "--json", str(file)]
        status = main(["bench", *where, *map(str, arguments)])
        out, err = capsys.readouterr()
        report = json.loads(file.read_text()) if file.exists() else None
        return status, report, out, err

    return run


def test_a_closed_loop_reports_every_request(bench):
    status, report, out, err = bench(*SMALL, "--requests", 6, "--concurrency", 2)
    assert (status, err) == (0, "")
    (level,) = report["levels"]
    assert level["load"]["mode"] == "closed"
    assert level["requests"]["succeeded"] == level["requests"]["sent"] == 6
    assert level["tokens"]["prompt"] == 48
    assert level["tokens"]["output"] == 24
    assert level["latency_s"]["ttft"]["count"] == level["latency_s"]["e2e"]["count"] == 6
    assert level["server_s"]["queue"]["count"] == 6
    assert "2 at a time" in out
    assert "6 of 6 succeeded" in out


def test_the_json_is_the_documented_schema(bench, server):
    _, report, _, _ = bench(*SMALL, "--requests", 2, "--seed", 5, "--slo", "ttft=60s")
    strict = msgspec.json.decode(json.dumps(report).encode(), type=Report)
    assert (strict.schema_version, strict.seed) == (SCHEMA_VERSION, 5)
    assert strict.model_ids == {server.address: "demo"}
    assert strict.options["requests"] == 2
    assert strict.levels[0].goodput.share == 1.0
    # Every field is written, so that readers need no defaults.
    assert set(report) == {field.name for field in dataclasses.fields(Report)}


def test_rates_are_levels_of_an_open_loop_from_several_processes(bench, tmp_path):
    pictures, lines = tmp_path / "pictures", tmp_path / "records.jsonl"
    options = ["--request-rate", "20,40", "--requests", 5, "--processes", 2]
    outputs = ["--plot", pictures, "--records", lines]
    status, report, out, _ = bench(*SMALL, *options, *outputs)
    assert status == 0
    assert [level["load"]["request_rate"] for level in report["levels"]] == [20.0, 40.0]
    for level in report["levels"]:
        assert level["requests"]["succeeded"] == 5
        assert level["clients"]["processes"] == len(level["clients"]["busy"]) == 2
    assert "all loads" in out
    assert sorted(path.name for path in pictures.iterdir()) == [
        "latency.png",
        "sweep.png",
        "timeline-1.png",
        "timeline-2.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2, 3, 4] * 2
    assert all(row["output_tokens"] == 4 for row in rows)
    assert all(row["sent_s"] >= row["due_s"] for row in rows)


def test_errors_are_counted_and_the_rest_is_measured(bench, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    wrong = {"prompt": "x", "max_new_tokens": 1_000_000}
    right = {"messages": [{"role": "user", "content": "def f():"}], "max_new_tokens": 3}
    prompts.write_text("\n".join(map(json.dumps, (right, wrong))))
    status, report, out, _ = bench("--prompts", prompts, "--requests", 4, "--warmup", 2)
    assert status == 0
    (level,) = report["levels"]
    assert level["requests"]["errors"] == {"INVALID_ARGUMENT": 2}
    assert level["requests"]["succeeded"] == level["latency_s"]["e2e"]["count"] == 2
    assert "first error: INVALID_ARGUMENT: stopping.max_new_tokens" in out


def test_a_level_without_a_success_is_exit_status_1(bench):
    status, report, _, _ = bench("--token-range", "900000:900001", "--warmup", 0, "--requests", 2)
    assert status == 1
    assert report["levels"][0]["requests"]["errors"] == {"INVALID_ARGUMENT": 2}


def test_a_warmup_without_a_success_ends_the_run(bench):
    status, report, out, err = bench("--token-range", "900000:900001", "--requests", 2)
    assert (status, report, out) == (1, None, "")
    assert err.startswith("error: no request of the warm-up succeeded: INVALID_ARGUMENT: ")


def test_a_workload_file_says_what_to_do(bench, tmp_path):
    path = tmp_path / "workload.json"
    rows = [{"prompt": 9, "output": 2, "at": 0}, {"prompt": 5, "output": 3, "at": 1}]
    path.write_text(json.dumps({"x": {"rate_per_s": 20, "requests": rows}}))
    status, report, _, _ = bench("--workload", path, "--warmup", 0)
    assert status == 0
    (level,) = report["levels"]
    assert level["load"] == {
        "mode": "replay",
        "concurrency": None,
        "request_rate": 20.0,
        "burstiness": None,
    }
    assert (level["tokens"]["prompt"], level["tokens"]["output"]) == (14, 5)


def test_shared_prefixes_are_found_in_the_cache(bench):
    options = ["--prefix-tokens", 64, "--concurrency", 1, "--requests", 3]
    _, report, _, _ = bench(*SMALL, *options)
    (level,) = report["levels"]
    assert level["tokens"]["cached"] >= 2 * 64
    assert level["tokens"]["prompt"] == 3 * 72
    assert not [w for w in level["warnings"] if "cached" in w]


def test_a_seed_of_an_earlier_run_is_warned_of(bench):
    for _ in range(2):
        _, report, _, _ = bench("--requests", 1, "--output-tokens", 1, "--seed", 77, "--warmup", 0)
    assert [w for w in report["levels"][0]["warnings"] if "use another --seed" in w]


def test_several_servers_take_turns(bench, server):
    _, report, out, _ = bench("--address", f"unix:{server.uds}", *SMALL, "--requests", 4)
    targets = report["levels"][0]["targets"]
    assert {target["address"]: target["sent"] for target in targets} == {
        server.address: 2,
        f"unix:{server.uds}": 2,
    }
    assert f"unix:{server.uds}" in out


def test_json_on_standard_output_is_all_that_is_there(server, capsys):
    arguments = [*SMALL, "--requests", "1", "--json", "-", "--address", server.address]
    assert main(["bench", *arguments]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema_version"] == SCHEMA_VERSION
    assert "1 of 1 succeeded" in err


def test_a_server_that_is_not_there_is_one_line(bench):
    address = f"127.0.0.1:{free_port()}"
    status, report, out, err = bench(address=address)
    assert (status, report, out) == (1, None, "")
    assert err.startswith(f"error: can't reach {address}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--concurrency", "x"], "error: Invalid value for --concurrency: is 'x'"),
        (["--requests", "0"], "error: Invalid value for '--requests'"),
        (["--workload", "/no/such"], "error: Invalid value for '--workload'"),
        (["--records", "/no/such/file"], "error: Invalid value for --records: there is no folder"),
        (["--json", "/"], "error: Invalid value for --json: / can't be written"),
        (["--plot", "/dev/null/x"], "error: Invalid value for --plot: /dev/null/x can't be made"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_status_2(bench, arguments, expected):
    status, _, out, err = bench(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(expected)
    assert err.count("\n") == 1


def test_plots_without_matplotlib_are_refused_before_the_run(bench, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, report, _, err = bench("--plot", tmp_path / "pictures")
    assert (status, report) == (1, None)
    assert "pip install 'tokenpod[bench]'" in err


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()]


@pytest.fixture
def endless(server):
    """A running command that would go on for long, and its two processes' ids."""
    command = [sys.executable, "-P", "-m", "tokenpod", "bench", "--address", server.address]
    options = ["--duration", "120", "--concurrency", "2", "--processes", "2", *SMALL]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process, wait_for(lambda: (found := children(process.pid))[1:] and found)
    finally:
        process.kill()
        process.communicate()


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ctrl_c_ends_the_command_and_its_processes(endless):
    process, workers = endless
    # As a terminal does: to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    wait_for(lambda: gone(workers))


def test_no_process_goes_on_when_the_command_is_killed(endless):
    process, workers = endless
    process.kill()
    wait_for(lambda: gone(workers))
