"""Every admission with every batching, under loads from half to twice what a machine can serve.

Saturation is what `exact` with `mixed` serves per second when all requests come at once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.loads import SHAPES, Lengths, arrivals, figures
from benchmarks.support.report import Report
from tokenpod.scheduler.policies.by_name import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.scheduler import Limits
from tokenpod.simulator.machines import MACHINES
from tokenpod.simulator.simulator import Simulator
from tokenpod.simulator.skipping import SkippingScheduler
from tokenpod.simulator.trace import Arrival

SMOKE = {
    "cpu": "--only 64k-chat --requests 20 --loads 1.0",
}
PAIRS = [(admission, turns) for admission in ADMISSIONS for turns in BATCHINGS]
LOADS = (0.5, 1.0, 1.5, 2.0)


def policies_of(pair: tuple[str, str]) -> dict[str, Any]:
    return {"admission": ADMISSIONS[pair[0]], "batching": batching(pair[1])}


def simulated(
    pair: tuple[str, str],
    machine: str,
    limits: Limits,
    load: list[Arrival],
    bounds: tuple[float, float],
) -> dict[str, float]:
    of = MACHINES[machine]
    scheduler = SkippingScheduler(limits, **policies_of(pair))
    began = time.process_time()
    outcome = Simulator(scheduler, of.step_times, load, 1024, overlap=of.overlap).run()
    took = time.process_time() - began
    found = figures(load, [came / 1e9 for came in outcome.tokens], bounds)
    return found | {
        "preemptions": outcome.load.preemptions,
        "wasted_tokens": outcome.wasted_tokens,
        "kv_mean": outcome.mean_use,
        "kv_most": outcome.most_use,
        "times_real": found["seconds"] / max(took, 1e-9),
    }


def grid(
    run: Callable[[tuple[str, str], list[Arrival]], dict[str, float]],
    pairs: list[tuple[str, str]],
    lengths: Lengths,
    loads: tuple[float, ...],
) -> Iterator[dict[str, Any]]:
    """Runs of all pairs, all at once and under loads of what `exact` with `mixed` reaches."""
    most = 0.0
    if loads:
        most = run(("exact", "mixed"), arrivals(lengths, None))["requests_per_s"]
        yield {"pair": "saturation", "requests_per_s": most}
    for pair in pairs:
        at_once = run(pair, arrivals(lengths, None))
        yield {"pair": "+".join(pair), "load": None} | at_once
        for load in loads:
            found = run(pair, arrivals(lengths, load * most))
            yield {"pair": "+".join(pair), "load": load} | found


def write(
    options: argparse.Namespace, name: str, rows: Iterator[dict[str, Any]], report: Report
) -> None:
    """Rows of the report, and a file of --out."""
    found = []
    for row in rows:
        found.append(row)
        report.row(name, **row)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1))


#: Seconds to the first token, and the 99th percentile of a request's gaps.
BOUNDS = (2.0, 0.1)


def run(options: argparse.Namespace, report: Report) -> None:
    """All pairs, at three kinds of loads and two sizes of pools."""
    of = MACHINES["h200"]
    for pool, slots in {"64k": 65_536, "900k": of.slots}.items():
        for shape, lengths_of in SHAPES.items():
            if options.only not in f"{pool}-{shape}":
                continue
            lengths = lengths_of(options.requests or 1000, 1024)
            limits = Limits(slots, of.max_rows, 4096, of.prefill_tokens)

            def one(pair: tuple[str, str], load: list[Arrival], limits: Limits = limits) -> Any:
                return simulated(pair, "h200", limits, load, BOUNDS)

            found = grid(one, pairs_of(options, PAIRS), lengths, options.loads)
            write(options, f"h200-{pool}-{shape}", found, report)


def pairs_of(options: argparse.Namespace, default: list[tuple[str, str]]) -> Any:
    """What --pairs asks for."""
    return [tuple(pair.split("+")) for pair in options.pairs] or default


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="a file of each pool and load goes here")
    parser.add_argument("--requests", type=int, help="default: 1000")
    parser.add_argument("--pairs", nargs="*", default=[], metavar="ADMISSION+BATCHING")
    parser.add_argument("--loads", nargs="*", type=float, default=LOADS, help="of saturation")
    parser.add_argument("--only", default="", help="part of POOL-LOAD")
