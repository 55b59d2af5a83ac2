"""The host's own work beside another commit's: planning, admission, encoding, the front end.

Each part is a case of this runner on processors alone, run in both checkouts by turns, each with
its own code. What counts is the ratio of the least of each, since a machine may be busy.

    guard --against v0.2.0
    guard --against HEAD~5 --parts planning encoding --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.pod import python_of
from benchmarks.support.report import ROOT, Report, commit_of

SMOKE = {"cpu": "--against HEAD --parts encoding --rounds 1 --rows 4"}
#: The case and its arguments, by what it says something about.
PARTS = {
    "planning": ("scheduler", "--parts", "steps", "turns"),
    "admission": ("scheduler", "--parts", "full"),
    "encoding": ("scheduler", "--parts", "encoding"),
    "front-end": ("front", "--steps", "50", "--streams", "64", "--seconds", "4"),
    "calls": ("front", "--steps", "--calls", "200"),
}
#: Columns that are compared. Of clocks only the least; else processor time.
COMPARED = (
    *("plan_us", "settle_us", "least_us", "nobody_comes_ms", "one_has_gone_ms"),
    *("plan_encode_us", "plan_read_us", "outputs_encode_us", "outputs_read_us"),
    *("us_a_token", "front_us_a_call"),
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, help="a commit, or a checkout's folder")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", default=["1", "64", "512"], help="of the scheduler's")


def run(asked: argparse.Namespace, report: Report) -> int:
    missing = []
    with checkout(asked.against) as before:
        for part in asked.parts:
            found: dict[str, dict[str, list[float]]] = {"now": {}, "before": {}}
            for turn in range(asked.rounds):
                trees = [("now", ROOT), ("before", before)]
                for name, tree in trees if turn % 2 == 0 else trees[::-1]:
                    for metric, value in measured(part, tree, asked.rows).items():
                        found[name].setdefault(metric, []).append(value)
            for metric, values in found["now"].items():
                theirs = found["before"].get(metric)
                if theirs is None:
                    missing.append(metric)
                    continue
                report.row(
                    "the host's work",
                    part=part,
                    what=metric,
                    now=min(values),
                    before=min(theirs),
                    now_over_before=min(values) / min(theirs),
                )
    if missing:
        report.note(f"{asked.against} does not measure: {', '.join(missing)}")
    return 0


@contextlib.contextmanager
def checkout(which: str) -> Iterator[Path]:
    """A folder with its code: what is named, or a worktree of the commit for as long as needed."""
    if Path(which).is_dir():
        yield Path(which).resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), which], check=True)
        try:
            subprocess.run([sys.executable, "-P", "client/stubs.py"], cwd=tree, check=True)
            print(f"beside {which}: {commit_of(tree)}", flush=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measured(part: str, tree: Path, rows: list[str]) -> dict[str, float]:
    """Times by what they are of; none if the checkout has no such case."""
    case, *arguments = PARTS[part]
    arguments += ["--rows", *rows] if case == "scheduler" else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [*python_of(tree), str(tree / "benchmarks" / "run.py"), case, *arguments]
        ran = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
        if ran.returncode == 2:  # arguments that it does not know
            return {}
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}\n{ran.stderr}")
        tables = json.loads(file.read_text())
    return {
        metric: value
        for table, found in tables.items()
        if table not in ("about", "notes")
        for row in found
        for metric, value in times_of(table, row).items()
    }


def times_of(table: str, row: dict[str, Any]) -> dict[str, float]:
    """Those of a row, each under the table's name and what tells the row from others."""
    which = ", ".join(f"{k} {v}" for k, v in row.items() if isinstance(v, str | int))
    return {f"{table}, {which}: {name}": row[name] for name in COMPARED if name in row}
