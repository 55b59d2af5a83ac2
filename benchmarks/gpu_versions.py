"""Two versions on one GPU in turn: seconds of the same requests, and the ratio of each pair.

    python -P benchmarks/gpu_versions.py --before ../before --seconds 115

Each version runs in a process of its own, from its own folder, with `benchmarks/gpu.py` of that
folder: an 8B shape with random bf16 weights, the defaults, the engine in process. `--before` is a
checkout of the other version (`git archive COMMIT | tar x -C ../before`). Both are loaded at once,
and one waits while the other runs. Three kinds of requests, all at once: *chat* and *uneven* as
`loads.py` draws them, and *one*, alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
#: KV slots of each: both have to fit beside one another.
SLOTS = 250_000
LONGEST = 1024


def child(root: Path) -> None:
    """Serve lists of (prompt, output) from stdin, a line each; print seconds for each."""
    sys.path.insert(0, str(root / "benchmarks"))
    from functools import partial

    import gpu
    import torch

    # Of this version, if the other one has none.
    sys.path.append(str(HERE))
    from gpu_defaults import server_like

    gpu.EngineOptions = partial(gpu.EngineOptions, max_batch_total_tokens=SLOTS)  # type: ignore[misc]
    model = json.loads((HERE / "shapes.json").read_text())["llama-3.1-8b"]
    bench = server_like(gpu, model)
    loop = Path(sys.modules["tokenpod.engine.loop"].__file__ or "").resolve()
    assert loop.is_relative_to(root), f"{loop} is not of {root}"
    with torch.inference_mode():
        print("ready", flush=True)
        for line in sys.stdin:
            seconds = bench.run([tuple(each) for each in json.loads(line)])
            print(f"took {seconds}", flush=True)


class Version:
    """A child."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        command = [sys.executable, "-P", str(HERE / "gpu_versions.py"), "--child", str(root)]
        self._process = subprocess.Popen(
            ["bash", str(root / "benchmarks/uninstalled.sh"), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self, word: str) -> str:
        """What follows this word on the next line that begins with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line[len(word) :].strip()
            print(f"{self.name}: {line}", end="", flush=True)
        raise SystemExit(f"{self.name} ended with status {self._process.wait()}")

    def run(self, lengths: list[tuple[int, int]]) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(lengths) + "\n")
        self._process.stdin.flush()
        return float(self.wait("took"))

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def cases(requests: int) -> dict[str, list[tuple[int, int]]]:
    """By name: prompts and outputs."""
    from loads import chat, uneven

    made: dict[str, Any] = {"chat": chat(requests, LONGEST), "uneven": uneven(requests, LONGEST)}
    found = {name: [(prompt, new) for prompt, new, _ in each] for name, each in made.items()}
    return found | {"one": [(256, 256)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="folder of the other version")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=115, help="begin no pair after these")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    began = time.perf_counter()
    sys.path.insert(0, str(HERE))
    found = cases(options.requests)
    versions = [Version("before", options.before.resolve()), Version("now", HERE.parent)]
    for version in versions:
        version.wait("ready")
        version.run([(128, 16)] * 64)
    print(f"both ready after {time.perf_counter() - began:.0f} s", flush=True)
    ratios: dict[str, list[float]] = {name: [] for name in found}
    number, longest = 0, 0.0
    while time.perf_counter() - began + longest < options.seconds:
        started = time.perf_counter()
        for name, lengths in found.items():
            # Who goes first changes with each pair.
            order = versions if number % 2 == 0 else versions[::-1]
            took = {version.name: version.run(lengths) for version in order}
            ratios[name].append(took["before"] / took["now"])
            print(f"{name:7} before {took['before']:.3f} s now {took['now']:.3f} s", flush=True)
        longest = max(longest, time.perf_counter() - started)
        number += 1
    for name, each in ratios.items():
        if each:
            middle, low, high = statistics.median(each), min(each), max(each)
            print(
                f"{name:7} before / now {middle:.3f} ({low:.3f} to {high:.3f}), {len(each)} pairs"
            )
    for version in versions:
        version.end()


if __name__ == "__main__":
    main()
