"""Every admission with every batching, under loads from half to twice what a machine can serve.

    python -P benchmarks/policies.py steps                      # measure the CPU's steps
    python -P benchmarks/policies.py simulate --out results     # all pairs, on the simulator
    python -P benchmarks/policies.py cpu --out results          # five pairs, the embedded model
    python -P benchmarks/policies.py gpu --out results --workload gpu-workload.json
    python -P benchmarks/policies.py plot --out results         # PNGs and tables of what is there

`gpu` needs one GPU: an 8B shape with random weights, in process, five pairs. Saturation is what
`exact` with `mixed` serves per second when all requests come at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_loads import demo, served
from gpu_defaults import server_like
from loads import SHAPES, Lengths, arrivals, figures
from policy_tables import plot

from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.policies import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.simulation.machines import MACHINES
from tokenpod.scheduler.simulation.simulator import Simulator
from tokenpod.scheduler.simulation.skipping import SkippingScheduler
from tokenpod.scheduler.simulation.step_times import StepSize, fitted
from tokenpod.scheduler.simulation.trace import Arrival
from tokenpod.scheduler.work import Limits

PAIRS = [(admission, turns) for admission in ADMISSIONS for turns in BATCHINGS]
#: Ours, TGI's, vLLM's, LightLLM's of 2023 within TGI's loop, and LightLLM's of 2025.
FIVE = [
    ("exact", "mixed"),
    ("reserve", "alternate"),
    ("optimistic", "mixed"),
    ("exact", "alternate"),
    ("past_future", "mixed"),
]
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
        "times_real": found["seconds"] / took,
    }


def measure_steps(options: argparse.Namespace) -> None:
    """Whole turns of the embedded model: plan, step, settle."""
    del options
    from tokenpod.scheduler.scheduler import Scheduler

    executor = demo(64)
    measured: list[tuple[StepSize, float]] = []

    def run(prompts: list[int], budget: int, count: int) -> list[tuple[Any, float]]:
        executor.release(range(65))
        scheduler, timed = Scheduler(Limits(39_000, 64, 4096, budget)), []
        for number, length in enumerate(prompts):
            own = [(7 * number + at) % 4000 + 10 for at in range(length)]
            scheduler.submit(Request([number], own, SamplingParams(), StoppingParams(400)))
        for _ in range(count):
            began = time.perf_counter()
            step = scheduler.plan(0)
            result = executor.launch(step.plan).wait()
            scheduler.settle(step, result.tokens, 0)
            timed.append((step, time.perf_counter() - began))
        return timed

    for rows, context in ((1, 64), (8, 64), (32, 64), (64, 64), (1, 1024), (16, 1024), (32, 1024)):
        steps = run([context] * rows, 39_000, 16)[1:]
        size = StepSize.of_rows(rows, context + 8)
        measured.append((size, min(took for _, took in steps)))
    for tokens in (32, 128, 512, 1024):
        took = min(run([tokens], 39_000, 1)[0][1] for _ in range(8))
        measured.append((StepSize.of_prompt(tokens), took))
    times = fitted(measured)
    for size, took in measured:
        error = times.nanoseconds(size) / 1e9 / took - 1
        print(f"        ({size}, {took:.3e}),  # model: {error:+.1%}")
    print(times)


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


def write(options: argparse.Namespace, name: str, rows: Iterator[dict[str, Any]]) -> None:
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for row in rows:
        found.append(row)
        told = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(name, told, flush=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))


#: Bounds of goodput: seconds to the first token, and the 99th percentile of a request's gaps.
BOUNDS = {"h200": (2.0, 0.1), "cpu": (2.0, 0.25)}


def simulate(options: argparse.Namespace) -> None:
    of = MACHINES["h200"]
    pools = {"64k": 65_536, "900k": of.slots}
    for pool, slots in pools.items():
        for shape, lengths_of in SHAPES.items():
            if options.only not in f"{pool}-{shape}":
                continue
            lengths = lengths_of(options.requests or 1000, 1024)
            limits = Limits(slots, of.max_rows, 4096, of.prefill_tokens)

            def run(
                pair: tuple[str, str], load: list[Arrival], limits: Limits = limits
            ) -> dict[str, float]:
                return simulated(pair, "h200", limits, load, BOUNDS["h200"])

            write(options, f"h200-{pool}-{shape}", grid(run, PAIRS, lengths, LOADS))


def on_cpu(options: argparse.Namespace) -> None:
    executor = demo(64)
    for shape in ("chat", "unknown"):
        if options.only not in shape:
            continue
        lengths = SHAPES[shape](options.requests or 80, 256)
        limits = Limits(6000, 64, 2048, 512)

        def run(
            pair: tuple[str, str], load: list[Arrival], limits: Limits = limits
        ) -> dict[str, float]:
            return served(
                policies_of(pair),
                executor,
                limits,
                load,
                BOUNDS["cpu"],
                overlap=False,
                vocabulary=4096,
            )

        write(options, f"cpu-{shape}", grid(run, FIVE, lengths, (1.0,)))

        def model(
            pair: tuple[str, str], load: list[Arrival], limits: Limits = limits
        ) -> dict[str, float]:
            return simulated(pair, "cpu", limits, load, BOUNDS["cpu"])

        write(options, f"cpu-{shape}-simulated", grid(model, FIVE, lengths, (1.0,)))


def on_gpu(options: argparse.Namespace) -> None:
    import gpu

    bench = server_like(gpu, json.loads(Path(options.workload).read_text())["model"])
    for pool, slots in {"64k": 65_536, "900k": 900_000}.items():
        for shape in ("chat", "unknown"):
            if options.only not in f"{pool}-{shape}":
                continue
            lengths = SHAPES[shape](options.requests or 1000, 1024)
            limits = Limits(slots, 512, 4096, 4096)

            def run(
                pair: tuple[str, str], load: list[Arrival], limits: Limits = limits
            ) -> dict[str, float]:
                return served(
                    policies_of(pair),
                    bench.loop.executor,
                    limits,
                    load,
                    BOUNDS["h200"],
                    overlap=True,
                    vocabulary=128_000,
                )

            pairs = [tuple(pair.split("+")) for pair in options.pairs] or FIVE
            loads = () if options.at_once else (1.0,)
            write(options, f"gpu-{pool}-{shape}", grid(run, pairs, lengths, loads))  # type: ignore[arg-type]


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = {
        "steps": measure_steps,
        "simulate": simulate,
        "cpu": on_cpu,
        "gpu": on_gpu,
        "plot": plot,
    }
    parser.add_argument("command", choices=commands)
    parser.add_argument("--out", default="benchmarks/policies-results")
    parser.add_argument("--images", default="docs/images")
    parser.add_argument("--workload", default="gpu-workload.json")
    parser.add_argument("--requests", type=int, help="default: 1000, and 80 on the CPU")
    parser.add_argument("--pairs", nargs="*", default=[], help="on the GPU; else five")
    parser.add_argument("--at-once", action="store_true", help="on the GPU; without other loads")
    parser.add_argument("--only", default="", help="part of POOL-SHAPE, or of SHAPE on the CPU")
    options = parser.parse_args()
    commands[options.command](options)


if __name__ == "__main__":
    main()
