"""Every case of the table of docs in one run of ten minutes on one GPU, and that table.

Each case is a command of this runner in a process of its own, so one that fails or takes too long
leaves the others their time, and the rows that it had. What has too little time left is not begun.
A case begins when the device's memory is as free as it was at first. `--into PAGE` puts the table
between the page's two comments, dated, or writes a new file; page and `--json` are written after
each case.

    tables --workload gpu-workload.json --into docs/measurements/gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.report import ROOT, Report, shown

SMOKE = {
    "cpu": "--small --cases bf16 products attention experts --seconds 230",
    "gpu": "--small --cases bf16 products attention experts int4 --seconds 230",
}
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
#: What a case may take, in times of what it takes by estimate; and less than it, it is not begun.
MOST_TIMES, LEAST_TIMES = 1.6, 0.7
#: Seconds for a case that is interrupted: it stops its pod, which is killed otherwise.
END_SECONDS = 15
#: Seconds that a case waits for the memory of the one before, and bytes that may be missing.
MEMORY_SECONDS, MEMORY_BYTES = 20, 1 << 30


@dataclass(frozen=True)
class Case:
    """A command, and the columns of its tables that the page has."""

    title: str
    command: str
    columns: tuple[str, ...]
    #: About what it takes on an H200 with an empty kernel cache, its start included.
    seconds: float
    #: A column whose values become columns of what the next ones say.
    across: tuple[str, ...] = ()


#: Those that say most come first: what has no time is left out.
CASES = {
    "serve": Case(
        "8B through gRPC",
        "serve --rates inf --requests 1000",
        ("case", "seconds", "output_tokens/s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms",
         "seconds_to_SERVING"),
        110,
    ),
    "bf16": Case(
        "8B, 16 bits, the engine in process",
        "steps --decode 1x256 64x1024 16x8192 256x512 --prompts 2048 8192",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share", "prompt_tokens",
         "turn_ms"),
        60,
    ),
    "serve-int4": Case(
        "8B through gRPC, int4",
        "serve --rates inf --requests 1000 -- --quantize int4",
        ("case", "seconds", "output_tokens/s", "ttft_p99_ms", "itl_p99_ms", "seconds_to_SERVING"),
        85,
    ),
    "products": Case(
        "Products of an 8B layer: microseconds and share of the limit",
        "products --kinds bf16 int4 int8 fp8 fp8-blocks --products qkv output gate_up down"
        " --tokens 1 16 64 128 256 512 1024",
        ("product", "tokens"),
        60,
        across=("format", "us", "limit_share"),
    ),
    "attention": Case(
        "Attention of an 8B layer",
        "attention --decode 1x8192 16x8192 64x1024 512x300 --prompts 2048/2048 8192/8192",
        (),
        35,
    ),
    "experts": Case(
        "Blocks of experts: microseconds and share of the limit",
        "experts --layers Qwen3-30B-A3B gpt-oss-20b --kinds bf16 mxfp4 fp8-blocks"
        " --tokens 1 64 2048",
        ("layer", "tokens"),
        60,
        across=("format", "us", "limit_share"),
    ),
    "fp8": Case(
        "8B, fp8",
        "steps --quantize fp8 --decode 1x256 64x1024 256x512 --prompts 8192 --mixed",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share"),
        50,
    ),
    "int4": Case(
        "8B, int4",
        "steps --quantize int4 --decode 1x256 64x1024 256x512 --prompts 8192 --mixed",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share"),
        50,
    ),
}  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--workload", type=Path, help="its cases through gRPC, too")
    parser.add_argument("--seconds", type=float, default=600, help="of all cases together")
    parser.add_argument("--small", action="store_true", help="each case as --smoke has it")
    parser.add_argument("--into", type=Path, help="the page that gets the table")
    parser.add_argument("--commit", help="of a tree that is no checkout")


def run(asked: argparse.Namespace, report: Report) -> int:
    if not torch.cuda.is_available():
        report.note("no GPU: these are not the figures of docs")
    until = time.monotonic() + asked.seconds
    report.about["commit"] = asked.commit or report.about["commit"]
    head = f"{report.about['at']}, {report.about.get('device', 'no GPU')}, commit "
    head += f"{report.about['commit']}, torch {report.about.get('torch', '-')}, one run "
    parts, failed = [head + "(`benchmarks/run.py tables`)."], []
    free = free_bytes()
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.cases:
            case = CASES[name]
            if asked.small:
                case = replace(case, command=smallest(case.command.split()[0]))
            await_memory(free)
            left = until - time.monotonic() - END_SECONDS
            if left < LEAST_TIMES * case.seconds:
                print(f"\n{name}: {left:.0f} s are left, it takes {case.seconds:.0f} s", flush=True)
                failed.append(name)
                continue
            began = time.monotonic()
            seconds = min(left, MOST_TIMES * case.seconds)
            workload = None if asked.small else asked.workload
            command, found, whole = measured(case, workload, Path(scratch), seconds)
            failed += [] if whole else [name]
            parts.append(section(replace(case, command=command), found, whole=whole))
            print(f"\n{parts[-1]}\n\n{name}: {time.monotonic() - began:.0f} s", flush=True)
            if asked.into:
                write(asked.into, "\n\n".join(parts))
            for table, rows in found.items():
                if table != "about":
                    report.tables.setdefault(f"{name}: {table}", []).extend(rows)
            report.write()
    if failed:
        report.note(f"not finished, or had no time: {', '.join(failed)}")
    return 1 if failed else 0


def free_bytes() -> int:
    """Of the memory of the first GPU that cases see, by the driver; 0 without one.

    Not by torch: its context would take memory from what is measured.
    """
    asked = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        asked.append(f"--id={first}")
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        return int(said.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return 0


def await_memory(free: int) -> None:
    """Wait until nearly as much memory is free; what is missing is printed."""
    end = time.monotonic() + MEMORY_SECONDS
    while (missing := free - free_bytes()) > MEMORY_BYTES:
        if time.monotonic() > end:
            print(f"\n{missing / 2**30:.1f} GiB of a case before are still taken", flush=True)
            return
        time.sleep(0.2)


def smallest(name: str) -> str:
    """The command of a case at its smallest."""
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    return f"{name} {import_module(f'benchmarks.cases.{name}').SMOKE[kind]}"


def measured(
    case: Case, workload: Path | None, scratch: Path, seconds: float
) -> tuple[str, dict[str, Any], bool]:
    """Its command, its tables, and whether it ended well within its time; if not, why is printed.

    The command is said without what only this run needs.
    """
    name, *arguments = case.command.split()
    file, log = scratch / "rows.json", scratch / "log.txt"
    file.unlink(missing_ok=True)
    said = case.command
    # Before its own arguments: what follows `--` is for a server. Those share a checkpoint.
    before = ["--json", str(file)]
    if name == "serve":
        before += ["--folder", str(scratch / "model")]
        if workload:
            before += ["--workload", str(workload.resolve())]
            arguments = arguments[arguments.index("--") :] if "--" in arguments else []
            said = " ".join(["serve", "--workload", workload.name, *arguments])
    runner = [sys.executable, "-P", str(ROOT / "benchmarks" / "run.py")]
    why = ""
    with log.open("w") as output:  # no pipe, which what outlives the case could keep open
        ran = subprocess.Popen(
            [*runner, name, *before, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ran.wait(seconds)
        except subprocess.TimeoutExpired:
            why = f"took more than {seconds:.0f} s\n"
        finally:
            end(ran)
    found = dict(json.loads(file.read_text())) if file.exists() else {}
    text = log.read_text(errors="replace")
    whole = ran.returncode == 0 and not why and "FAILED" not in text
    if not whole:
        print(f"FAILED {case.title}: {said}: {why}{text[-3000:]}", flush=True)
    return said, found, whole


def end(ran: subprocess.Popen[bytes]) -> None:
    """Interrupt a case that goes on, and all that it has started; kill what does not end."""
    for each in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, each)
        with contextlib.suppress(subprocess.TimeoutExpired):
            ran.wait(END_SECONDS)


def section(case: Case, tables: dict[str, Any], *, whole: bool) -> str:
    """As Markdown: its tables, of the columns that it shows."""
    lines = [f"**{case.title}** (`{case.command}`{'' if whole else ', **not finished**'})"]
    for table, rows in tables.items():
        if table in ("about", "notes", "pairs"):
            continue
        cells = across(rows, case) if case.across else plain(rows, case)
        columns = list(dict.fromkeys(name for row in cells for name in row))
        if columns:
            names = [name.replace("_", " ") for name in columns]
            lines += ["", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
            lines += [f"| {' | '.join(row.get(c, '-') for c in columns)} |" for row in cells]
    return "\n".join(lines)


def plain(rows: list[dict[str, Any]], case: Case) -> list[dict[str, str]]:
    """The cells of each row, of the case's columns."""
    return [
        {name: shown(name, row[name]) for name in row if not case.columns or name in case.columns}
        for row in rows
    ]


def across(rows: list[dict[str, Any]], case: Case) -> list[dict[str, str]]:
    """Rows that the case's columns tell apart, with a column for each value of the one across."""
    by, *say = case.across
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if by in row:
            key = tuple(shown(name, row.get(name)) for name in case.columns)
            line = found.setdefault(key, dict(zip(case.columns, key, strict=True)))
            line[str(row[by])] = ", ".join(shown(name, row.get(name)) for name in say)
    return list(found.values())


def write(page: Path, text: str) -> None:
    """Between the page's two comments; a page without them is written anew."""
    whole = f"{BEGIN}\n\n{text}\n\n{END}\n"
    if page.exists() and BEGIN in (old := page.read_text()):
        before, _, rest = old.partition(BEGIN)
        whole = before + whole.rstrip("\n") + rest.partition(END)[2]
    page.write_text(whole)
