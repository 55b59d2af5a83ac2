"""Where the time of constrained rows' turns and steps goes."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from constrained_engine import Bench
from constrained_rows import Library
from turn_times import TurnTimes

from tokenpod.engine.constraints import masks as masks_of_texts
from tokenpod.engine.constraints.masked_steps import MaskedSteps
from tokenpod.engine.constraints.masks import Masks
from tokenpod.engine.device_masked import MaskedDraws
from tokenpod.engine.device_rounds import DeviceDrawing
from tokenpod.engine.device_sampler import DeviceSampler
from tokenpod.engine.executor import StepResult
from tokenpod.engine.graphs import ladder
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.mailbox import Flight, Mailbox, Mark
from tokenpod.engine.step_executor import StepExecutor


@dataclass(frozen=True)
class StepTime:
    """One step; times in milliseconds."""

    rows: int
    tokens: int
    new: int
    #: On the device: between the step before and this one, then its two parts.
    before: float
    forward: float
    then: float
    #: From the moment at which the loop had the results of the step before to that of this one.
    period: float


class Turns:
    """Times the parts of the loop's turns, and the steps, until `stop` is called."""

    def __init__(self, bench: Bench) -> None:
        self.steps: list[StepTime] = []
        self._last: tuple[Mailbox, float] | None = None
        self._times = times = TurnTimes((EngineLoop, "turn"))
        for name in ("plan", "settle", "load"):
            times.part(type(bench.loop.scheduler), name)
        times.part(StepExecutor, "launch")
        times.part(StepExecutor, "_take_rows", "launch: new rows")
        times.part(StepExecutor, "release", "launch: rows that are over")
        times.part(Mark, "wait", "wait for the step")
        times.part(Flight, "sample", "launch the sampler")
        times.part(EngineLoop, "_publish", "publish")
        for name in ("look", "prepare", "settled", "sample"):
            times.part(MaskedSteps, name, f"masked.{name}")
        times.part(Masks, "masks", "masks, waiting for them")
        times.part(Masks, "took", "masks.took")
        times.part(Library, "advance", "library")
        times.part(masks_of_texts, "read_together")
        times.part(DeviceDrawing, "_bits", "masks to the device")
        times.part(MaskedDraws, "enter", "masks to the device, captured")
        times.part(MaskedDraws, "drawn", "sampler, captured: results")
        times.part(DeviceSampler, "begin", "sampler.begin")
        times.part(DeviceSampler, "finish", "sampler.finish")
        times.part(Mailbox, "send", "results to the host")
        self._wait = Flight.wait
        times.replace(Flight, "wait", lambda flight: self._noted(flight))
        times.part(Flight, "wait", "results of the step")

    def stop(self) -> None:
        """Leave all as it was."""
        self._times.stop()

    def _noted(self, flight: Flight) -> StepResult:
        result, plan, mailbox, now = self._wait(flight), flight.plan, flight._mailbox, _ms()
        forward, then = result.forward_ns / 1e6, result.sample_ns / 1e6
        self._times.note("(device: forward)", forward)
        self._times.note("(device: then, with waiting)", then)
        if self._last is not None:
            before = self._last[0]._done.nanoseconds_to(mailbox._began) / 1e6
            period, new = now - self._last[1], len(plan.n_row)
            took = StepTime(plan.rows, plan.tokens, new, before, forward, then, period)
            self.steps.append(took)
        self._last = mailbox, now
        return result

    def by_part(self, **wanted: Any) -> str:
        """A line for each part of a turn; see `TurnTimes.report`."""
        return self._times.report(**wanted)

    def by_size(self) -> str:
        """A line for each size of step: median and 95th percentile of its times."""
        sizes, found = np.array(ladder(4096)), defaultdict(list)
        for step in self.steps:
            size = int(sizes[np.searchsorted(sizes, step.tokens)])
            found[size, step.tokens > step.rows].append(step)
        names = "before", "forward", "then", "period"
        lines = [f"    {'tokens up to':14} {'steps':>5} {'rows':>4} {'new':>4}"]
        lines[0] += "".join(f" {name + ' p50, p95':>17}" for name in names) + "  ms"
        for (size, prompts), steps in sorted(found.items()):
            kind = f"{size}{' + prompts' if prompts else ''}"
            line = f"    {kind:14} {len(steps):5}"
            line += "".join(
                f" {np.mean([getattr(s, n) for s in steps]):4.0f}" for n in ("rows", "new")
            )
            for name in names:
                p50, p95 = np.percentile([getattr(step, name) for step in steps], (50, 95))
                line += f" {p50:9.3f} {p95:7.3f}"
            lines.append(line)
        return "\n".join(lines)


def _ms() -> float:
    return time.perf_counter() * 1e3
