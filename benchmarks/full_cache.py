"""What a full prefix cache does to slots and to planning: the scheduler alone, on a CPU.

    python -P benchmarks/full_cache.py --workload gpu-workload.json

Generations of requests of very different kinds fill the cache; then the workload's cases run as on
a GPU, with an executor that answers at once. Printed are a step's time on the host, and of how many
runs of adjacent slots a row's keys and values consist.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from tokenpod.core.outputs import StepOutputs
from tokenpod.core.plan import StepPlan
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.executor import StepResult, new_rows
from tokenpod.engine.loop import EngineLoop
from tokenpod.scheduler.scheduler import Limits, Scheduler

#: (rows, context) of decode that `gpu.py` was asked for when the cache was found to be in pieces.
DECODES = ((1, 256), (16, 8192), (64, 1024), (200, 1024), (512, 400))
PREFILL = 4096
VOCABULARY = 128_000
#: Turns between two looks at the slots.
EVERY = 200


def generations() -> Iterator[list[tuple[int, int]]]:
    """(prompt, output) of requests that run at once, as `gpu.py` runs them before its cases."""
    for rows, context in DECODES:
        joining = rows * context // PREFILL
        yield [(16, 2)]
        yield [(max(context - joining - 32, 16), 72 + joining)] * rows
    yield [(64, 400)] * 200 + [(128, 1)] * 24
    for prompt in (2048, 8192, 32_768):
        yield from [[(prompt, 1)]] * 8


@dataclass
class Slots:
    """An executor that remembers where each row's keys and values lie, and answers at once."""

    rows: dict[int, list[Any]] = field(default_factory=dict)
    draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def launch(self, plan: StepPlan) -> Any:
        """Random tokens."""
        for row in plan.freed.tolist():
            self.rows.pop(row, None)
        for row, prefix in new_rows(plan):
            self.rows[row] = [prefix]
        ends = plan.r_tokens.cumsum()[:-1]
        for row, slots in zip(plan.r_row.tolist(), np.split(plan.t_slot, ends), strict=True):
            self.rows[row].append(slots)
        count = int(plan.r_samples.sum())
        result = StepResult(self.draw.integers(VOCABULARY, size=count).tolist(), [0.0] * count, [])
        return SimpleNamespace(wait=lambda: result)

    def release(self, rows: Sequence[int]) -> None:
        """Rows are forgotten with the plan that frees them."""

    def runs(self) -> list[int]:
        """Of each row."""
        joined = [np.concatenate(slots) for slots in self.rows.values()]
        return [1 + int((np.diff(slots) != 1).sum()) for slots in joined]


@dataclass
class Client:
    """The other end of the loop."""

    requests: list[Request] = field(default_factory=list)
    left: int = 0

    def receive(self, seconds: float | None) -> list[Request]:
        """All at once."""
        del seconds
        requests, self.requests = self.requests, []
        return requests

    def send(self, message: object) -> None:
        """Count what has ended."""
        assert isinstance(message, StepOutputs)
        assert not message.failures, message.failures[0]
        self.left -= sum(finish != 0 for finish in message.finishes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", default="gpu-workload.json")
    parser.add_argument("--slots", type=int, default=896_578)
    options = parser.parse_args()
    cases = json.loads(Path(options.workload).read_text())["cases"]
    client, executor, draw = Client(), Slots(), Random(3)
    limits = Limits(options.slots, max_rows=512, max_positions=36_864, prefill_tokens=PREFILL)
    loop = EngineLoop(client, Scheduler(limits), executor, overlap=True)  # type: ignore[arg-type]
    number = 0

    def run(name: str, lengths: Sequence[Sequence[int]]) -> None:
        nonlocal number
        for prompt, output in lengths:
            tokens = [draw.randrange(VOCABULARY) for _ in range(prompt)]
            stopping = StoppingParams(max_new_tokens=output)
            client.requests.append(Request([number], tokens, SamplingParams(), stopping))
            number += 1
        client.left = len(lengths)
        times: list[float] = []
        runs: list[int] = []
        while client.left:
            began = time.perf_counter()
            loop.turn()
            times.append(time.perf_counter() - began)
            if len(times) % EVERY == 0:
                runs += executor.runs()
        held = f", runs a row {statistics.mean(runs):6.1f}, most {max(runs)}" if runs else ""
        print(f"{name:12} {statistics.median(times) * 1e3:6.2f} ms a step{held}", flush=True)

    for generation in generations():
        run("filling", generation)
    for case in cases:
        run(case["name"], case["requests"])


if __name__ == "__main__":
    main()
