"""`make test-gpu SHARD=1/6`: one of several equal parts of the tests that need a GPU.

Its result is kept in benchmarks/gpu-results/, with the commit and the GPU, so that the parts can be
run one by one, on machines that are lent for minutes. Which test is in which part follows from its
name alone (tests/conftest.py). Of several GPUs all are seen.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "gpu-results"
#: Lines of pytest's report that are kept: the slowest tests, failures by name, the sum.
KEPT_LINES = 40


def main(shard: str, *arguments: str) -> int:
    """Run a shard, written as 1/6, and write what came of it; pytest's exit status."""
    tests = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", f"--shard={shard}"]
    tests += ["--durations=10", *arguments]
    lines = []
    with subprocess.Popen(
        tests, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if "--collect-only" not in arguments:
        about = [f"shard {shard}", f"commit {commit()}", f"on {gpus()}", f"at {now()}"]
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"{shard.replace('/', '-of-')}.txt"
        file.write_text("\n".join([*about, "", *lines[-KEPT_LINES:], ""]))
    return running.returncode


def commit() -> str:
    """What is checked out, and whether files differ from it."""
    head = said("git", "rev-parse", "HEAD")
    changed = said("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head or 'unknown'}{' with changes' if changed else ''}"


def gpus() -> str:
    """Names of the GPUs."""
    names = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return names.replace("\n", "; ") or "no GPU"


def now() -> str:
    """The time, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def said(*command: str) -> str:
    """What a command writes; nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
