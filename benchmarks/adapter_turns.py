"""The engine of gpu_adapter_swaps.py --turns: where its turns and reading spend their time."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from turn_times import TurnTimes


class WatchedReads:
    """What the thread that reads adapters does, and for how long."""

    def __init__(self) -> None:
        self.doing = ""
        self.milliseconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, name: str) -> None:
        """Note each call of a function that belongs to this class or module."""
        before = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            outer, self.doing, began = self.doing, name, time.perf_counter()
            try:
                return before(*args, **more)
            finally:
                took = (time.perf_counter() - began) * 1e3
                self.milliseconds.setdefault(name, []).append(took)
                self.doing = outer

        setattr(owner, name, noted)

    def report(self) -> str:
        lines = [f"    {'of reading':24} {'calls':>7} {'mean':>7} {'most':>7} ms"]
        for name, all_of in self.milliseconds.items():
            mean, most = statistics.mean(all_of), max(all_of)
            lines.append(f"    {name:24} {len(all_of):7} {mean:7.3f} {most:7.3f}")
        return "\n".join(lines)


def main() -> int:
    """The engine's process, which says at its end where its turns spent their time."""
    from tokenpod.engine import adapters, pace, process
    from tokenpod.engine.device_executor import DeviceExecutor
    from tokenpod.engine.host_executor import HostExecutor
    from tokenpod.engine.loop import EngineLoop
    from tokenpod.engine.mailbox import Flight
    from tokenpod.models.adapters import files
    from tokenpod.models.adapters.store import AdapterStore
    from tokenpod.scheduler.scheduler import Scheduler

    reads = WatchedReads()
    for owner, name in (
        (AdapterStore, "read"),
        (files.Digesting, "result"),
        (files, "TensorFile"),
        (files._Reader, "_read_module"),
        (AdapterStore, "_packed"),
        (AdapterStore, "_views"),
        (AdapterStore, "_pieces"),
        (pace.Pace, "rest"),
    ):
        reads.watch(owner, name)
    times = TurnTimes((EngineLoop, "turn"))
    for owner, name in (
        (adapters.Adapters, "settle"),
        (Scheduler, "plan"),
        (HostExecutor, "launch"),
        (DeviceExecutor, "launch"),
        (Flight, "wait"),
        (Scheduler, "settle"),
        (EngineLoop, "_publish"),
    ):
        times.part(owner, name, f"{owner.__name__}.{name}")
    turn, ends = EngineLoop.turn, []

    def noted(loop: EngineLoop) -> None:
        turn(loop)
        ends.append(reads.doing)

    times.replace(EngineLoop, "turn", noted)
    code = process.main()
    turns = times.turns[: len(ends)]  # the last one, in which the link closes, has no end
    full = np.array([len(each) > 5 for each in turns])  # a step was planned, launched and settled
    length = np.array([each["(turn)"] for each in turns])
    loading = np.array([bool(doing) for doing in ends]) & full
    if loading.any() and (full & ~loading).any():
        long = loading & (length >= np.quantile(length[loading], 0.98))
        for name, chosen in (
            ("no loads", full & ~loading),
            ("loads", loading),
            ("loads, longest 2 %", long),
        ):
            picked = frozenset(id(turns[at]) for at in np.flatnonzero(chosen))
            print(f"  turns, {name}:\n{times.report(lambda each, own=picked: id(each) in own)}")
        found = Counter(ends[at] for at in np.flatnonzero(long))
        print(f"  when the longest ended: {dict(found.most_common())}")
    print(reads.report(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
