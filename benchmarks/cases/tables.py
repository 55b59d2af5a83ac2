"""Every case of the table of docs in one run of ten minutes on one GPU, and that table.

Each case is a command of this runner in a process of its own, so one that fails or takes too long
leaves the others their time, and the rows that it had. What has too little time left is not begun.
`--into PAGE` puts the table between the page's two comments, dated, or writes a new file; it is
written again after each case.

    tables --workload gpu-workload.json --into docs/measurements/gpu.md
"""

from __future__ import annotations

import argparse
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
#: Seconds for a case that is interrupted: it stops its pod.
END_SECONDS = 40


@dataclass(frozen=True)
class Case:
    """A command, and the columns of its tables that the page has."""

    title: str
    command: str
    columns: tuple[str, ...]
    #: About what it takes on an H200 with an empty kernel cache, its start included.
    seconds: float


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
        "Products of an 8B layer",
        "products --kinds bf16 int4 int8 fp8 fp8-blocks --products qkv output gate_up down"
        " --tokens 1 16 64 128 256 512 1024",
        ("product", "format", "tokens", "us", "times_bf16", "limit_share"),
        60,
    ),
    "attention": Case(
        "Attention of an 8B layer",
        "attention --decode 1x8192 16x8192 64x1024 512x300 --prompts 2048/2048 8192/8192",
        (),
        35,
    ),
    "experts": Case(
        "Blocks of experts",
        "experts --layers Qwen3-30B-A3B gpt-oss-20b --kinds bf16 mxfp4 fp8-blocks"
        " --tokens 1 64 2048",
        ("layer", "format", "tokens", "us", "times_bf16", "limit_share"),
        60,
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


def run(asked: argparse.Namespace, report: Report) -> int:
    if not torch.cuda.is_available():
        report.note("no GPU: these are not the figures of docs")
    until = time.monotonic() + asked.seconds
    head = f"{report.about['at']}, {report.about.get('device', 'no GPU')}, commit "
    head += f"{report.about['commit']}, torch {report.about.get('torch', '-')}, one run "
    parts, failed = [head + "(`benchmarks/run.py tables`)."], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.cases:
            case, left = CASES[name], until - time.monotonic()
            if asked.small:
                case = replace(case, command=smallest(case.command.split()[0]))
            if left < LEAST_TIMES * case.seconds:
                failed.append(name)
                continue
            began = time.monotonic()
            seconds = min(left, MOST_TIMES * case.seconds)
            found, whole = measured(case, asked.workload, Path(scratch), seconds)
            failed += [] if whole else [name]
            parts.append(section(case, found, whole=whole))
            print(f"\n{parts[-1]}\n\n{name}: {time.monotonic() - began:.0f} s", flush=True)
            if asked.into:
                write(asked.into, "\n\n".join(parts))
            for table, rows in found.items():
                if table != "about":
                    report.tables.setdefault(f"{name}: {table}", []).extend(rows)
    if failed:
        report.note(f"not finished, or had no time: {', '.join(failed)}")
    return 1 if failed else 0


def smallest(name: str) -> str:
    """The command of a case at its smallest."""
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    return f"{name} {import_module(f'benchmarks.cases.{name}').SMOKE[kind]}"


def measured(
    case: Case, workload: Path | None, scratch: Path, seconds: float
) -> tuple[dict[str, Any], bool]:
    """Its tables, and whether it ended well within its time; if not, why is printed."""
    name, *arguments = case.command.split()
    file = scratch / "rows.json"
    file.unlink(missing_ok=True)
    # Before its own arguments: what follows `--` is for a server. Those share a checkpoint.
    before = ["--json", str(file)]
    if name == "serve":
        before += ["--folder", str(scratch / "model")]
        if workload:
            before += ["--workload", str(workload.resolve())]
            arguments = arguments[arguments.index("--") :] if "--" in arguments else []
    runner = [sys.executable, "-P", str(ROOT / "benchmarks" / "run.py")]
    ran = subprocess.Popen(
        [*runner, name, *before, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    why = ""
    try:
        said = ran.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        why = f"took more than {seconds:.0f} s\n"
        said = ended(ran)
    found = dict(json.loads(file.read_text())) if file.exists() else {}
    if whole := ran.returncode == 0:
        return found, whole
    print(f"FAILED {case.title}: {case.command}: {why}{said[-3000:]}", flush=True)
    return found, whole


def ended(ran: subprocess.Popen[str]) -> str:
    """What a case has printed, which is interrupted, and killed if it does not end."""
    ran.send_signal(signal.SIGINT)
    try:
        return ran.communicate(timeout=END_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(ran.pid, signal.SIGKILL)
        return ran.communicate()[0]


def section(case: Case, tables: dict[str, Any], *, whole: bool) -> str:
    """As Markdown: its tables, of the columns that it shows."""
    lines = [f"**{case.title}** (`{case.command}`{'' if whole else ', **not finished**'})"]
    for table, rows in tables.items():
        if table in ("about", "notes", "pairs"):
            continue
        columns = [name for name in rows[0] if not case.columns or name in case.columns]
        if columns:
            names = [name.replace("_", " ") for name in columns]
            lines += ["", f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
            lines += [f"| {' | '.join(shown(c, row.get(c)) for c in columns)} |" for row in rows]
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    """Between the page's two comments; a page without them is written anew."""
    whole = f"{BEGIN}\n\n{text}\n\n{END}\n"
    if page.exists() and BEGIN in (old := page.read_text()):
        before, _, rest = old.partition(BEGIN)
        whole = before + whole.rstrip("\n") + rest.partition(END)[2]
    page.write_text(whole)
