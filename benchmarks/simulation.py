"""How many times as fast as it runs a load is simulated: 8B on one H200, `exact` and `mixed`.

    python -P benchmarks/simulation.py --requests 1000 --runs 3

Chat-like requests at half of saturation, at saturation and all at once, and uneven ones all at
once. Processor time of this process; the best of the runs counts where the machine is busy.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from loads import SHAPES, arrivals

from tokenpod.scheduler.work import Limits
from tokenpod.simulator.machines import MACHINES
from tokenpod.simulator.simulator import Simulator
from tokenpod.simulator.skipping import SkippingScheduler

#: By name: lengths, and requests per second; None: all at once.
CASES: dict[str, tuple[str, float | None]] = {
    "chat, half of saturation": ("chat", 28.0),
    "chat, saturation": ("chat", 56.0),
    "chat, at once": ("chat", None),
    "uneven, at once": ("uneven", None),
}


def used() -> float:
    """Seconds of a processor that this process has taken."""
    taken = resource.getrusage(resource.RUSAGE_SELF)
    return taken.ru_utime + taken.ru_stime


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    machine = MACHINES["h200"]
    limits = Limits(machine.slots, machine.max_rows, 4096, machine.prefill_tokens)
    for name, (shape, rate) in CASES.items():
        load, speeds = arrivals(SHAPES[shape](options.requests, 1024), rate), []
        for _ in range(options.runs):
            scheduler = SkippingScheduler(limits)
            simulator = Simulator(
                scheduler, machine.step_times, load, 1024, overlap=machine.overlap
            )
            began = used()
            outcome = simulator.run()
            speeds.append(outcome.end / 1e9 / (used() - began))
        told = ", ".join(f"{speed:.1f}" for speed in speeds)
        skipped = f"{outcome.skipped:,} of {outcome.steps:,} steps skipped"
        print(f"{name:26} {max(speeds):6.1f} times as fast ({told}); {skipped}", flush=True)


if __name__ == "__main__":
    main()
