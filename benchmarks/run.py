"""Run a benchmark: `.venv/bin/python -P benchmarks/run.py CASE [options]`; `--list` names them.

`--smoke cpu` and `--smoke gpu` run every case of such a machine at its smallest, each in a process
of its own, and say which failed: they show that the cases work, not how fast anything is.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import signal
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: Seconds that a case may take in a smoke run.
SMOKE_SECONDS = 240

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # so kernels' results are checked, not timed

if "benchmarks" not in sys.modules:
    # The checkout's root stays off the path: its folders are packages of other names, too.
    package = types.ModuleType("benchmarks")
    package.__path__ = [str(HERE)]
    sys.modules["benchmarks"] = package


def cases() -> dict[str, str]:
    """What each case measures, the first line of its module, by name."""
    found = {}
    for path in sorted((HERE / "cases").glob("[a-z]*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem.replace("_", "-")] = text.partition("\n")[0]
    return found


def load(case: str) -> types.ModuleType:
    """The case's module: `options(parser)`, `run(options, report)` and SMOKE."""
    return importlib.import_module(f"benchmarks.cases.{case.replace('-', '_')}")


def main() -> int:
    """Run what is asked for; the exit status."""
    names = cases()
    if sys.argv[1:2] == ["--list"]:
        print("\n".join(f"{name:14} {text}" for name, text in names.items()))
        return 0
    if sys.argv[1:2] == ["--smoke"]:
        return smoke(*sys.argv[2:])
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(f"usage: run.py CASE [options]; cases: {', '.join(names)}", file=sys.stderr)
        return 2
    module = load(sys.argv[1])
    parser = argparse.ArgumentParser(
        prog=f"run.py {sys.argv[1]}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.options(parser)
    parser.add_argument("--json", type=Path, help="write all rows here, too")
    arguments = parser.parse_args(sys.argv[2:])
    if getattr(arguments, "child", False):
        return module.run(arguments, None) or 0
    from benchmarks.support.report import Report

    report = Report(arguments.json)
    status = module.run(arguments, report) or 0
    report.write()
    return status


def smoke(kind: str, *only: str) -> int:
    """Run cases at their smallest; 1 if one failed."""
    failed = []
    for name in only or cases():
        arguments = load(name).SMOKE.get(kind)
        if arguments is None:
            continue
        began = time.monotonic()
        command = [sys.executable, "-P", str(HERE / "run.py"), name, *arguments.split()]
        print(f"\n=== {name} {arguments}", flush=True)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                said = process.communicate(timeout=SMOKE_SECONDS)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0] + b"\nkilled: it took too long"
        text = said.decode(errors="replace")
        bad = process.returncode != 0 or "FAILED" in text or "WRONG" in text
        print(text if bad else "\n".join(text.splitlines()[-12:]))
        print(f"=== {name}: {'FAILED' if bad else 'ok'}, {time.monotonic() - began:.0f} s")
        failed += [name] * bad
    print(f"\nfailed: {', '.join(failed) or 'none'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    if find_spec("tokenpod") is None and "TOKENPOD_UNINSTALLED" not in os.environ:
        script = str(HERE / "uninstalled.sh")
        os.execvp("bash", ["bash", script, sys.executable, "-P", *sys.argv])
    sys.exit(main())
