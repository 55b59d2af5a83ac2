"""Every case of the table of docs in one run of ten minutes on one GPU, and that table.

Each case is a command of this runner in a process of its own, so one that fails or takes too long
leaves the others their time. `--into PAGE` puts the table between the page's two comments, dated,
or writes a new file.

    tables --workload gpu-workload.json --into docs/measurements/gpu.md
"""

from __future__ import annotations

import argparse
import json
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
    "cpu": "--small --cases bf16 products attention experts --seconds 200",
    "gpu": "--small --cases bf16 products attention experts int4 --seconds 200",
}
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
#: Seconds of one case, its start and compiling included.
MOST_SECONDS = 150


@dataclass(frozen=True)
class Case:
    """A command, and the columns of its tables that the page has."""

    title: str
    command: str
    columns: tuple[str, ...]


#: Those that say most come first: what has no time is left out.
CASES = {
    "bf16": Case(
        "8B, 16 bits, the engine in process",
        "steps --decode 1x256 64x1024 16x8192 256x512 --prompts 2048 8192",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share", "prompt_tokens",
         "turn_ms"),
    ),
    "products": Case(
        "Products of an 8B layer",
        "products --kinds bf16 int4 int8 fp8 fp8-blocks --products qkv output gate_up down"
        " --tokens 1 16 64 128 256 512 1024",
        ("product", "format", "tokens", "us", "times_bf16", "limit_share"),
    ),
    "attention": Case(
        "Attention of an 8B layer",
        "attention --decode 1x8192 16x8192 64x1024 512x300 --prompts 2048/2048 8192/8192",
        (),
    ),
    "experts": Case(
        "Blocks of experts",
        "experts --layers Qwen3-30B-A3B gpt-oss-20b --kinds bf16 mxfp4 fp8-blocks"
        " --tokens 1 64 2048",
        ("layer", "format", "tokens", "us", "times_bf16", "limit_share"),
    ),
    "serve": Case(
        "8B through gRPC",
        "serve --rates inf --requests 1000",
        ("case", "seconds", "output_tokens/s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms",
         "seconds_to_SERVING"),
    ),
    "fp8": Case(
        "8B, fp8",
        "steps --quantize fp8 --decode 1x256 64x1024 256x512 --prompts 8192 --mixed",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share"),
    ),
    "int4": Case(
        "8B, int4",
        "steps --quantize int4 --decode 1x256 64x1024 256x512 --prompts 8192 --mixed",
        ("rows", "context", "tokens", "step_ms", "ms", "TFLOP/s", "limit_share"),
    ),
    "serve-int4": Case(
        "8B through gRPC, int4",
        "serve --rates inf --requests 1000 -- --quantize int4",
        ("case", "seconds", "output_tokens/s", "ttft_p99_ms", "itl_p99_ms", "seconds_to_SERVING"),
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
    parts, failed = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.cases:
            case, left = CASES[name], until - time.monotonic()
            if asked.small:
                case = replace(case, command=smallest(case.command.split()[0]))
            seconds = min(left, MOST_SECONDS)
            found = measured(case, asked.workload, Path(scratch), seconds) if left > 0 else None
            if found is None:
                failed.append(name)
                continue
            parts.append(section(case, found))
            print(f"\n{parts[-1]}", flush=True)
            for table, rows in found.items():
                if table != "about":
                    report.tables.setdefault(f"{name}: {table}", []).extend(rows)
    if failed:
        report.note(f"failed, or had no time: {', '.join(failed)}")
    if asked.into:
        about = report.about
        head = f"{about['at']}, {about.get('device', 'no GPU')}, commit {about['commit']}, "
        head += f"torch {about.get('torch', '-')}, one run (`benchmarks/run.py tables`)."
        write(asked.into, "\n\n".join([head, *parts]))
    return 1 if failed else 0


def smallest(name: str) -> str:
    """The command of a case at its smallest."""
    kind = "gpu" if torch.cuda.is_available() else "cpu"
    return f"{name} {import_module(f'benchmarks.cases.{name}').SMOKE[kind]}"


def measured(
    case: Case, workload: Path | None, scratch: Path, seconds: float
) -> dict[str, Any] | None:
    """Its tables; None if it failed or took too long, which is printed."""
    name, *arguments = case.command.split()
    file = scratch / "rows.json"
    # Before its own arguments: what follows `--` is for a server. Those share a checkpoint.
    before = ["--json", str(file)]
    if name == "serve":
        before += ["--folder", str(scratch / "model")]
        before += ["--workload", str(workload.resolve())] if workload else []
    runner = [sys.executable, "-P", str(ROOT / "benchmarks" / "run.py")]
    command = [*runner, name, *before, *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        if ran.returncode == 0:
            return dict(json.loads(file.read_text()))
        why = f"{ran.stdout[-1000:]}\n{ran.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        why = f"took more than {seconds:.0f} s"
    print(f"FAILED {case.title}: {case.command}: {why}", flush=True)
    return None


def section(case: Case, tables: dict[str, Any]) -> str:
    """As Markdown: its tables, of the columns that it shows."""
    lines = [f"**{case.title}** (`{case.command}`)"]
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
