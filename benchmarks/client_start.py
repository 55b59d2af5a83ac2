"""Measure what the client's commands cost before they do anything: until help is printed, and until
`tokenpod generate` sends its first byte.

    python -P benchmarks/client_start.py --command .venv/bin/tokenpod

Processor seconds do not depend on what else the machine does, as seconds of the clock do: both are
shown, as medians with the middle half of all runs.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def help_seconds(command: str) -> tuple[float, float]:
    """Processor and clock seconds of `--help`, interpreter included."""
    before, began = os.times(), time.monotonic()
    subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)
    after, took = os.times(), time.monotonic() - began
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, took


def generate_seconds(command: str) -> tuple[float, float]:
    """The same of `generate`, until its first byte arrives."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        process = subprocess.Popen([command, "generate", "hello", "--address", address])
        try:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                took = time.monotonic() - began
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / _TICKS, took
        finally:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--command", default="tokenpod")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    ways = {"--help": help_seconds, "generate": generate_seconds}
    found = {
        name: [way(options.command) for _ in range(options.runs)] for name, way in ways.items()
    }
    for name, runs in found.items():
        processor, clock = (_spread(list(values)) for values in zip(*runs, strict=True))
        print(f"{name:9} {processor} s of a processor, {clock} s of the clock")
    return 0


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
