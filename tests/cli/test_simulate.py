"""`tokenpod simulate`: the scheduler's answer to a trace, as bench's table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokenpod.commands.simulate import simulate

TRACE = "arrival_s,prompt_tokens,output_tokens,max_new_tokens\n" + "".join(
    f"{at / 10},{100 + at},{20 + 7 * at % 80},100\n" for at in range(60)
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def run(*arguments: str) -> int:
    status = simulate.main([*arguments], standalone_mode=False)
    assert isinstance(status, int)
    return status


def test_it_prints_what_bench_prints(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--slo", "ttft=1s") == 0
    told = capsys.readouterr().out
    assert "60 of 60 succeeded" in told
    outputs = sum(20 + 7 * at % 80 for at in range(60))
    assert f"{outputs:,} (1.00 per message)" in told
    for row in ("time to first token (ttft)", "queue, by the server", "goodput (ttft 1000 ms)"):
        assert row in told
    assert "preemptions: 0" in told
    assert "one NVIDIA H200" in told


def test_the_policies_are_those_that_are_named(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (trace, "--max-batch-total-tokens", "400", "--speed", "10")
    assert run(*small, "--admission", "optimistic") == 0
    preempted = capsys.readouterr().out
    assert "preemptions: 0" not in preempted
    assert "tokens swapped" not in preempted
    host = ("--host-kv-bytes", str(1 << 30), "--preemption", "swap")
    assert run(*small, "--admission", "optimistic", *host) == 0
    swapped = capsys.readouterr().out
    assert "tokens swapped: 0" not in swapped
    assert "tokens swapped: " in swapped
    assert run(*small, "--admission", "reserve", "--batching", "alternate") == 0
    assert "preemptions: 0" in capsys.readouterr().out


def test_a_prompt_that_alternate_can_not_take_whole_is_refused(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--batching", "alternate", "--max-batch-prefill-tokens", "120") == 0
    told = capsys.readouterr().out
    assert "21 of 60 succeeded" in told
    assert "39 requests could never fit and were refused" in told


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--max-waiting-tokens", "5"), "--max-waiting-tokens is 5: it needs --batching alternate"),
        (("--slo", "ttft"), "--slo has 'ttft': the time must be above 0"),
    ],
)
def test_what_can_not_be_is_refused_in_a_line(
    trace: str, flags: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, *flags) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.pod
def test_it_needs_no_torch(trace: str) -> None:
    code = "import sys, tokenpod.commands.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
