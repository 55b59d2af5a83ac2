"""Where the time of steps with a draft model goes, on one GPU: what to improve for a better ratio.

    python -P benchmarks/gpu_draft_budget.py [--drafts 150m eagle3] [--chains 2 4 8] [--right 0.75]

The models are those of gpu_draft_model.py. Two tables for each draft model:

    graphs    what captured steps take by themselves, replayed back to back, in milliseconds: a
              small step, the served model's step that checks drafts, by its tokens, and a plain one
    steps     batch 1, greedy, always the same number of drafts: what a step brings, and its time
              in milliseconds from one step's results to the next one's, divided into the device's
              (`drafts`, `check`: the served model, `draw`; then the draft model follows) and
              `idle`, in which the device waits for the host. Of that `between` is from results to
              the next launch (settling, publishing, planning), and `launch` is the launch itself,
              most of which the device does not wait for. `decided` lets the cost model choose

With --profile the kernels of a small step and of a check that take most, by name. With --waits the
host waits for results in other ways (asleep; looking now and then, as it does; looking always), and
with --within the draft model follows within the captured step, not behind it: for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_draft_model import CASES, POSITIONS, PREFILL, ROWS, engines
from gpu_drafts import Client

from tokenpod.core.plan import StepPlan
from tokenpod.engine import mailbox
from tokenpod.engine.assemble import Assembled
from tokenpod.engine.captured_steps import CapturedSteps
from tokenpod.engine.executor import Launched, Masks, StepResult
from tokenpod.engine.graphs import Captured
from tokenpod.engine.loop import EngineLoop
from tokenpod.scheduler.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.step_times import Costs

#: Names of a step's parts, in milliseconds.
PARTS = ("drafts", "check", "draw", "idle", "between", "launch", "step")


@dataclass
class Watched:
    """An executor, and where the time of its steps with drafts went."""

    executor: Any
    #: Of each step with drafts behind another one: drafts, drafts that were right, parts.
    steps: list[tuple[int, int, tuple[float, ...]]] = field(default_factory=list)
    #: When the last results came; None: they were not of a step with drafts.
    ended: float | None = None

    def launch(self, plan: StepPlan) -> Launched:
        """See `executor.Launcher`."""
        began = time.perf_counter()
        launched = self.executor.launch(plan)
        return _Watched(self, plan, launched, began, time.perf_counter())


@dataclass
class _Watched:
    into: Watched
    plan: StepPlan
    launched: Launched
    began: float
    returned: float

    def sample(self, masks: Masks) -> None:
        self.launched.sample(masks)

    def wait(self) -> StepResult:
        result = self.launched.wait()
        now, before = time.perf_counter(), self.into.ended
        drafts = int(self.plan.r_samples.max(initial=0)) - 1
        self.into.ended = now if drafts > 0 else None
        if drafts > 0 and before is not None:
            found, forward, draw = (
                ns / 1e6 for ns in (result.drafting_ns, result.forward_ns, result.sample_ns)
            )
            whole = 1e3 * (now - before)
            idle = whole - forward - draw
            between, launch = 1e3 * (self.began - before), 1e3 * (self.returned - self.began)
            parts = found, forward - found, draw, idle, between, launch, whole
            right = sum(token >= 0 for token in result.tokens) - 1
            self.into.steps.append((drafts, right, parts))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", nargs="*", default=["150m", "eagle3"])
    parser.add_argument("--chains", nargs="*", type=int, default=[2, 3, 4, 5, 6, 8])
    parser.add_argument("--right", type=float, default=0.75)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--within", action="store_true")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    options = parser.parse_args()
    for draft in options.drafts:
        began = time.perf_counter()
        options.draft = draft
        plain, drafting = engines(options)
        print(f"{draft}: ready after {time.perf_counter() - began:.0f} s", flush=True)
        graphs(drafting, options)
        without = steps(plain, 0, options)["tokens/s"]
        for chain in [*options.chains, None]:
            found = steps(drafting, chain, options)
            found["ratio"] = round(found["tokens/s"] / without, 3)
            print(json.dumps({"draft": draft} | found), flush=True)
        if options.waits:
            waits(drafting, options)
        if options.within:
            with within():
                del plain, drafting
                torch.cuda.empty_cache()
                plain, drafting = engines(options)
            print("within:", flush=True)
            graphs(drafting, options)
            print(json.dumps(steps(drafting, options.chains[-1], options)), flush=True)
        del plain, drafting
        torch.cuda.empty_cache()


def waits(made: Assembled, options: argparse.Namespace) -> None:
    """The same steps with other ways to wait for results."""

    def asleep(self: Any, *, urgent: bool) -> None:
        self._event.synchronize()

    for name, change in (
        ("asleep", patch.object(mailbox.Mark, "wait", asleep)),
        ("looking always", patch.object(mailbox, "LOOK_SECONDS", 0)),
        ("looking now and then", patch.object(mailbox, "LOOK_SECONDS", mailbox.LOOK_SECONDS)),
    ):
        with change:
            found = steps(made, options.chains[-1], options)
        print(json.dumps({"wait": name} | found), flush=True)


def within() -> Any:
    """With a draft model that follows in the captured step, as where nobody waits for it."""

    def fewer(self: CapturedSteps, **given: Any) -> None:
        made(self, **{**given, "behind": False})

    made = CapturedSteps.__init__
    return patch.object(CapturedSteps, "__init__", fewer)


def graphs(made: Assembled, options: argparse.Namespace) -> None:
    """What captured steps take alone."""
    executor: Any = made.executor
    _, decode, drafted, _ = executor._captured._kinds[False]
    small = executor._proposals._small._graphs[1]
    found: dict[str, float] = {"small step": alone(small.fitting(1))}
    found["plain"] = alone(decode.fitting(1))
    for size in sorted({drafted.fitting(n + 1).counts.tokens for n in (1, 3, 6, 8, 16)}):
        found[f"check {size}"] = alone(drafted.fitting(size))
    print(json.dumps(found), flush=True)
    if options.profile:
        kernels("small step", small.fitting(1), options.profile)
        kernels("check", drafted.fitting(options.speculate + 1), options.profile)


def alone(captured: Captured, times: int = 20) -> float:
    """Milliseconds of a replay among others, the median of five rounds of these."""
    captured.run()
    rounds = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            captured.run()
        last.record()
        torch.cuda.synchronize()
        rounds.append(first.elapsed_time(last) / times)
    return round(statistics.median(rounds), 3)


def kernels(name: str, captured: Captured, most: int, times: int = 5) -> None:
    """Print the kernels of a replay that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            captured.run()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    whole = sum(event.self_device_time_total for event in events) / times
    print(f"{name}: {whole:.0f} us in kernels")
    for event in events[:most]:
        took = event.self_device_time_total / times
        print(f"  {took:8.1f} us  {event.count / times:6.1f} x  {event.key[:90]}", flush=True)


def steps(made: Assembled, chain: int | None, options: argparse.Namespace) -> dict[str, Any]:
    """One request after a warm one, with always as many drafts; None: as the cost model has it."""
    for seed in (0, 1):
        made.executor.release(range(ROWS + 1))
        requests = CASES["greedy 1"](seed)
        client, watched = Client(requests), Watched(made.executor)
        limits = Limits(made.slots, ROWS, POSITIONS, PREFILL)

        def drafting(kv: Any) -> Drafting:
            costs = Costs() if chain is None else None
            return Drafting(ModelDrafts(), chain or options.speculate, kv, costs)

        scheduler = Scheduler(limits, drafting=None if chain == 0 else drafting)
        loop = EngineLoop(client, scheduler, watched, overlap=made.overlap)  # type: ignore[arg-type]
        while client.started < len(requests):
            loop.turn()
        began, before = time.perf_counter(), client.tokens
        while client.left:
            loop.turn()
        torch.cuda.synchronize()
        rate = (client.tokens - before) / (time.perf_counter() - began)
    found: dict[str, Any] = {"chain": chain, "tokens/s": round(rate, 1)}
    if watched.steps:
        drafts, right, parts = zip(*watched.steps, strict=True)
        found["drafts a step"] = round(statistics.mean(drafts), 2)
        found["tokens a step"] = round(1 + statistics.mean(right), 2)
        medians = map(statistics.median, zip(*parts, strict=True))
        found |= {name: round(took, 3) for name, took in zip(PARTS, medians, strict=True)}
    return found


if __name__ == "__main__":
    main()
