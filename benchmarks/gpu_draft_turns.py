"""Turns of an engine with drafts, one after the other on one GPU: what each waits for.

    python -P benchmarks/gpu_draft_turns.py [--drafts eagle3 150m] [--within] [--chains 6]

Batch 1, greedy, the models of gpu_draft_model.py, each text after a warm one, without the engine
that has no draft model. Printed for each draft model:

    a line of medians, in milliseconds: the device's parts of a step (`gap`: from one step's results
        to the first work of the next one, in which what follows a step is computed, too, and the
        drafts are found that the next one needs; `drafts`: that of it; `check`, `draw`), and when
        the host was where, after the device had a step's results
    the slowest turns: what each took, where it was slower than the median, and collected garbage

With --within also the first draft model following within the captured step, not behind it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_draft_budget import within
from gpu_draft_model import CASES, POSITIONS, PREFILL, ROWS, drafting_engine, models
from gpu_drafts import Client

from tokenpod.core.plan import StepPlan
from tokenpod.engine import mailbox
from tokenpod.engine.assemble import Assembled
from tokenpod.engine.device_drafts import Proposals
from tokenpod.engine.device_executor import DeviceExecutor
from tokenpod.engine.executor import Launched, Masks, StepResult
from tokenpod.engine.graphs import Captured
from tokenpod.engine.loop import EngineLoop
from tokenpod.engine.small_steps import SmallSteps
from tokenpod.scheduler.drafting import Drafting, ModelDrafts
from tokenpod.scheduler.scheduler import Limits, Scheduler
from tokenpod.scheduler.step_times import Costs

#: After which of our functions a mark is made, in the order of a turn. Where one is called again in
#: a turn, the first call counts.
PLACES: list[tuple[type, str, str]] = [
    (mailbox.Mark, "wait", "seen"),
    (mailbox.Flight, "wait", "read"),
    (Scheduler, "settle", "settled"),
    (Scheduler, "plan", "planned"),
    (mailbox.Mailbox, "begin", "begun"),
    (SmallSteps, "fill", "small filled"),
    (Proposals, "find", "drafts queued"),
    (DeviceExecutor, "_filled", "filled"),
    (Captured, "replay", "replayed"),
    (DeviceExecutor, "_draw", "drawn"),
    (Proposals, "find_ahead", "found ahead"),
    (DeviceExecutor, "launch", "launched"),
    (EngineLoop, "_publish", "published"),
]


@dataclass
class Turns:
    """What happened in turns."""

    #: A point of both clocks: an event, and the time of the host when the device had it.
    zero: torch.cuda.Event
    zero_at: float
    #: Of the turn under way: by name, when.
    marks: dict[str, float] = field(default_factory=dict)
    collecting: float = 0.0
    garbage: float = 0.0
    #: Of each turn: the device's parts, the host's marks after the results, garbage; ms each.
    device: list[dict[str, float]] = field(default_factory=list)
    host: list[dict[str, float]] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    #: The mailbox of the step before, when its results were there, and its drafts.
    before: Any = None
    before_at: float = 0.0
    drafts: list[int] = field(default_factory=list)

    def collected(self, phase: str, _: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self.collecting = now
        else:
            self.garbage += now - self.collecting

    def on_host(self, event: Any) -> float:
        """When an event was, on the host's clock."""
        return self.zero_at + self.zero.elapsed_time(event) / 1e3


@dataclass
class Timed:
    """An executor whose steps note where the time went."""

    executor: Any
    turns: Turns

    def launch(self, plan: StepPlan) -> Launched:
        """See `executor.Launcher`."""
        return _Timed(self.turns, plan, self.executor.launch(plan))


@dataclass
class _Timed:
    turns: Turns
    plan: StepPlan
    launched: Any

    def sample(self, masks: Masks) -> None:
        self.launched.sample(masks)

    def wait(self) -> StepResult:
        turns, box = self.turns, self.launched._mailbox
        marks, turns.marks = turns.marks, {}
        result: StepResult = self.launched.wait()
        done = turns.on_host(box._done._event)
        if self.plan.drafts and turns.before is not None and turns.before is not box:
            # The marks are those of the launch of this step, behind the results before.
            gap = turns.before._done._event.elapsed_time(box._began._event)
            found, forward = result.drafting_ns / 1e6, result.forward_ns / 1e6
            parts = {"gap": gap, "drafts": found, "check": forward - found}
            turns.device.append(parts | {"draw": result.sample_ns / 1e6})
            marks = {name: 1e3 * (at - turns.before_at) for name, at in marks.items()}
            turns.host.append(marks | {"garbage": 1e3 * turns.garbage})
            turns.whole.append(1e3 * (done - turns.before_at))
            turns.drafts.append(int(self.plan.r_samples.max()) - 1)
        turns.before, turns.before_at = (box, done) if self.plan.drafts else (None, 0.0)
        turns.garbage = 0.0
        return result


@contextmanager
def marked(turns: Turns) -> Iterator[None]:
    """With marks after our functions."""

    def after(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*given: Any, **named: Any) -> Any:
            result = function(*given, **named)
            turns.marks.setdefault(name, time.perf_counter())
            return result

        return wrapped

    with ExitStack() as stack:
        for owner, attribute, name in PLACES:
            function = getattr(owner, attribute, None)
            if function is not None:
                stack.enter_context(patch.object(owner, attribute, after(function, name)))
        gc.callbacks.append(turns.collected)
        try:
            yield
        finally:
            gc.callbacks.remove(turns.collected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafts", nargs="*", default=["eagle3", "150m"])
    parser.add_argument("--right", type=float, default=0.75)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--chains", nargs="*", type=int, default=[6])
    parser.add_argument("--cases", nargs="*", default=["greedy 1", "sampled 1"])
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--within", action="store_true")
    options = parser.parse_args()
    variants = [(draft, False) for draft in options.drafts]
    variants += [(options.drafts[0], True)] * options.within
    for options.draft, inside in variants:
        with ExitStack() as stack:
            if inside:
                stack.enter_context(within())
            began = time.perf_counter()
            made = drafting_engine(*models(options), options)
            ready = time.perf_counter() - began
            name = options.draft + ", within" * inside
            print(f"{name}: ready after {ready:.0f} s", flush=True)
            for case in options.cases:
                for chain in (None, *options.chains):
                    turns(made, case, chain, options)
            del made
        torch.cuda.empty_cache()


def turns(made: Assembled, case: str, chain: int | None, options: argparse.Namespace) -> None:
    """Some texts with always as many drafts; None: as the cost model has it."""
    rates = []
    zero = torch.cuda.Event(enable_timing=True)
    zero.record()
    zero.synchronize()
    found = Turns(zero, time.perf_counter())
    costs = Costs() if chain is None else None
    with marked(found):
        for seed in range(options.texts + 1):
            rates.append(answer(made, case, seed, chain, costs, found, options))
            if not seed:
                cold = worst(found)
                found.device.clear(), found.host.clear(), found.whole.clear(), found.drafts.clear()
    line: dict[str, Any] = {"draft": options.draft, "case": case, "chain": chain}
    line |= {"tokens/s": [round(rate) for rate in rates], "turns": len(found.whole)}
    if not found.whole:
        print(json.dumps(line), flush=True)
        return
    line |= {"drafts": round(statistics.mean(found.drafts), 2)}
    print(json.dumps(line | {"turn": round(statistics.median(found.whole), 3)}))
    print("  device", json.dumps(medians(found.device)))
    print("  host  ", json.dumps(medians(found.host)))
    print("  slowest of the first text:", json.dumps(cold))
    print("  slowest of the others:    ", json.dumps(worst(found)), flush=True)


def medians(each: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in each for name in one)
    return {
        name: round(statistics.median(one[name] for one in each if name in one), 3)
        for name in names
    }


def worst(found: Turns, most: int = 4) -> list[dict[str, Any]]:
    """The turns that took more than 1.5 times the median, and where they were behind it by most."""
    usual = statistics.median(found.whole or [0.0])
    device, host = medians(found.device), medians(found.host)
    slow = [at for at, took in enumerate(found.whole) if took > 1.5 * usual]
    told = []
    for at in sorted(slow, key=lambda at: -found.whole[at])[:most]:
        more = {name: took - device[name] for name, took in found.device[at].items()}
        late = {name: took - host.get(name, 0.0) for name, took in found.host[at].items()}
        first = next((name for name, by in late.items() if by > 0.3 * usual), None)
        part = max(more, key=lambda name: more[name])
        told.append(
            {"turn": at, "ms": round(found.whole[at], 2), part: round(more[part], 2)}
            | ({"host late at": first} if first else {})
            | {"garbage": round(found.host[at]["garbage"], 2)}
        )
    return [{"slow": len(slow), "of": len(found.whole)}, *told]


def answer(
    made: Assembled,
    case: str,
    seed: int,
    chain: int | None,
    costs: Costs | None,
    found: Turns,
    options: argparse.Namespace,
) -> float:
    """Tokens per second of one text."""
    made.executor.release(range(ROWS + 1))
    requests = CASES[case](seed)
    client = Client(requests)
    limits = Limits(made.slots, ROWS, POSITIONS, PREFILL)

    def drafting(kv: Any) -> Drafting:
        return Drafting(ModelDrafts(), chain or options.speculate, kv, costs)

    executor: Any = Timed(made.executor, found)
    loop = EngineLoop(client, Scheduler(limits, drafting=drafting), executor, overlap=made.overlap)  # type: ignore[arg-type]
    found.before = None
    while client.started < len(requests):
        loop.turn()
    began, before = time.perf_counter(), client.tokens
    while client.left:
        loop.turn()
    torch.cuda.synchronize()
    return (client.tokens - before) / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
