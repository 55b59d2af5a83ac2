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
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.scheduler.policies import ADMISSIONS, BATCHINGS, batching
from tokenpod.scheduler.simulation.machines import MACHINES
from tokenpod.scheduler.simulation.simulator import Simulator
from tokenpod.scheduler.simulation.skipping import SkippingScheduler
from tokenpod.scheduler.simulation.step_times import StepSize, fitted, relative_errors
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

Lengths = list[tuple[int, int, int]]  # prompt, output, asked for


# -- lengths -----------------------------------------------------------------------------------


def chat(count: int, longest: int, seed: int = 1) -> Lengths:
    """Like ShareGPT's: all ask for the longest output, and most end long before."""
    chance = random.Random(seed)

    def drawn(median: float, sigma: float) -> int:
        return min(max(int(chance.lognormvariate(np.log(median), sigma)), 4), longest)

    return [(drawn(longest / 6, 1.0), drawn(longest / 5, 0.9), longest) for _ in range(count)]


def uneven(count: int, longest: int, seed: int = 2) -> Lengths:
    """Outputs of 8 or of the longest, which requests ask for: their bounds are true."""
    chance = random.Random(seed)
    lengths = []
    for _ in range(count):
        new = chance.choice([8, longest])
        lengths.append((chance.randint(longest // 16, longest // 2), new, new))
    return lengths


def unknown(count: int, longest: int, seed: int = 2) -> Lengths:
    """The same outputs, but all ask for the longest."""
    return [(prompt, new, longest) for prompt, new, _ in uneven(count, longest, seed)]


SHAPES: dict[str, Callable[[int, int], Lengths]] = {
    "chat": chat,
    "uneven": uneven,
    "unknown": unknown,
}


def arrivals(lengths: Lengths, rate: float | None, seed: int = 5) -> list[Arrival]:
    """A Poisson process of so many requests per second; None: all at once."""
    chance, at, made = random.Random(seed), 0.0, []
    for prompt, output, asked in lengths:
        at += chance.expovariate(rate) if rate else 0.0
        made.append(Arrival(at, prompt, output, asked))
    return made


# -- what is measured --------------------------------------------------------------------------


def figures(
    arrived: list[Arrival], tokens: list[np.ndarray], bounds: tuple[float, float]
) -> dict[str, float]:
    """Of one run. `tokens`: seconds of each request's tokens; `bounds`: ttft and each gap."""
    end = max(float(came[-1]) for came in tokens)
    first = np.array([came[0] - each.at for each, came in zip(arrived, tokens, strict=True)])
    gaps = [np.diff(came) for came in tokens]
    slowest = np.array([np.quantile(gap, 0.99) if len(gap) else 0.0 for gap in gaps])
    good = (first <= bounds[0]) & (slowest <= bounds[1])
    every = np.concatenate(gaps)
    return {
        "seconds": end,
        "tokens_per_s": sum(map(len, tokens)) / end,
        "requests_per_s": len(arrived) / end,
        "goodput_per_s": float(good.sum()) / end,
        "good": float(good.mean()),
        "ttft_p50": float(np.quantile(first, 0.5)),
        "ttft_p99": float(np.quantile(first, 0.99)),
        "itl_p50": float(np.quantile(every, 0.5)),
        "itl_p99": float(np.quantile(every, 0.99)),
    }


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


# -- real runs ---------------------------------------------------------------------------------


class Client:
    """The other end of an engine's link: hands requests in when they are due."""

    def __init__(self, load: list[Arrival], vocabulary: int) -> None:
        chance = random.Random(3)
        self._load = load
        self._prompts = [
            [chance.randrange(10, vocabulary) for _ in range(each.prompt_tokens)] for each in load
        ]
        self._began = time.perf_counter()
        self._next = 0
        self.tokens: list[list[float]] = [[] for _ in load]
        self.left = len(load)
        self.last: StepOutputs | None = None

    @property
    def now(self) -> float:
        return time.perf_counter() - self._began

    def receive(self, seconds: float | None) -> list[Request]:
        found = []
        while self._next < len(self._load):
            due = self._load[self._next].at
            if due > self.now:
                if found or seconds == 0:
                    break
                time.sleep(max(min(due - self.now, seconds or 1.0), 0))
                continue
            found.append(self._request(self._next))
            self._next += 1
        return found

    def _request(self, number: int) -> Request:
        # The length is the trace's: what a model says would differ between runs.
        output = self._load[number].output_tokens
        stopping = StoppingParams(self._load[number].max_new_tokens or output)
        return Request([number], self._prompts[number], SamplingParams(), stopping)

    def send(self, message: object) -> None:
        assert isinstance(message, StepOutputs)
        self.last, now = message, self.now
        for sequence in message.sequence_ids:
            self.tokens[sequence].append(now)

    def over(self, scheduler: Any) -> None:
        """End by a stop what has come to its length, as a front end ends it at a stop sequence."""
        assert self.last is not None
        done = [
            i for i in self.last.sequence_ids if len(self.tokens[i]) >= self._load[i].output_tokens
        ]
        self.last = None
        if done:
            scheduler.abort(done, stopped=True)
            self.left -= len(done)


def served(
    pair: tuple[str, str],
    executor: Any,
    limits: Limits,
    load: list[Arrival],
    bounds: tuple[float, float],
    *,
    overlap: bool,
    vocabulary: int,
) -> dict[str, float]:
    """One run on a real model."""
    from tokenpod.engine.loop import EngineLoop
    from tokenpod.scheduler.scheduler import Scheduler

    client, scheduler = Client(load, vocabulary), Scheduler(limits, **policies_of(pair))
    executor.release(range(limits.max_rows + 1))
    loop = EngineLoop(client, scheduler, executor, overlap=overlap)  # type: ignore[arg-type]
    used, turns = 0.0, 0
    while client.left:
        loop.turn()
        if client.last is not None:
            client.over(scheduler)
        state = scheduler.load()
        used += state.slots - state.free_slots - state.evictable_slots
        turns += 1
    while scheduler.busy:
        loop.turn()
    tokens = [
        np.array(came[: each.output_tokens]) for each, came in zip(load, client.tokens, strict=True)
    ]
    found = figures(load, tokens, bounds)
    return found | {
        "preemptions": scheduler.load().preemptions,
        "kv_mean": used / turns / limits.slots,
    }


def demo(rows: int) -> Any:
    """The embedded model's executor on one thread."""
    import torch

    import tokenpod.models.demo
    from tokenpod.engine.host_executor import HostExecutor
    from tokenpod.kernels.pool import KVPool, alike
    from tokenpod.models.load import load_model

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    folder = Path(tokenpod.models.demo.__file__).parent
    model = load_model(folder, dtype=torch.float32, device=cpu, progress=lambda done, of: None)
    pool = KVPool(slots=40_000, layouts=[alike(2, 64)] * 8, dtype=torch.float32, device=cpu)
    return HostExecutor(model, pool, rows=rows + 1, vocab_size=4096)


# -- commands ----------------------------------------------------------------------------------


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
    for (size, took), error in zip(measured, relative_errors(times, measured), strict=True):
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
                pair, executor, limits, load, BOUNDS["cpu"], overlap=False, vocabulary=4096
            )

        write(options, f"cpu-{shape}", grid(run, FIVE, lengths, (1.0,)))

        def model(
            pair: tuple[str, str], load: list[Arrival], limits: Limits = limits
        ) -> dict[str, float]:
            return simulated(pair, "cpu", limits, load, BOUNDS["cpu"])

        write(options, f"cpu-{shape}-simulated", grid(model, FIVE, lengths, (1.0,)))


def on_gpu(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import gpu

    model = json.loads(Path(options.workload).read_text())["model"]
    made = argparse.Namespace(
        rows=512,
        prefill=4096,
        positions=4096,
        kv_cache_dtype="auto",
        steps=False,
        quantize="none",
        quantize_head=False,
    )
    bench = gpu.make_bench(model, made)
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
                    pair,
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


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: all at once, and at some loads."""
    loads = [load for load in (1.0, 1.5, 2.0) if any(row.get("load") == load for row in rows)]
    head = ["pair", "at once, tokens/s", "preemptions, computed again", "KV use"]
    head += [f"at {load:g}: good/s, ttft p99, gap p99" for load in loads]
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for pair in dict.fromkeys(row["pair"] for row in rows if "load" in row):
        own = {row["load"]: row for row in rows if row["pair"] == pair}
        most = own[None]
        again = f"{most['wasted_tokens']:,}" if "wasted_tokens" in most else "-"
        cells = [f"{most['tokens_per_s']:,.0f}", f"{most['preemptions']:,}, {again}"]
        cells.append(f"{most['kv_mean']:.0%}")
        for load in loads:
            at = own[load]
            gap = f"{at['itl_p99'] * 1e3:.0f} ms"
            cells.append(f"{at['goodput_per_s']:.1f}, {at['ttft_p99']:.2f} s, {gap}")
        yield f"| {pair} | " + " | ".join(cells) + " |"


def plot(options: argparse.Namespace) -> None:
    import matplotlib.pyplot as plt

    for path in sorted(Path(options.out).glob("*.json")):
        rows = json.loads(path.read_text())
        print(f"\n{path.stem}\n")
        print("\n".join(table(rows)))
        loads = sorted({row["load"] for row in rows if row.get("load")})
        if len(loads) < 2:
            continue
        shown = {
            "output tokens per second": "tokens_per_s",
            "good requests per second": "goodput_per_s",
            "first token, 99th percentile, s": "ttft_p99",
            "gap between tokens, 99th percentile, s": "itl_p99",
        }
        figure, axes = plt.subplots(2, 2, figsize=(11, 8))
        for (title, name), axis in zip(shown.items(), axes.flat, strict=True):
            for pair in dict.fromkeys(row["pair"] for row in rows if "load" in row):
                own = {row["load"]: row[name] for row in rows if row["pair"] == pair}
                style = "--" if pair.endswith("alternate") else "-"
                axis.plot(loads, [own[load] for load in loads], style, marker="o", label=pair)
            axis.set_title(title)
            axis.set_xlabel("offered load, of saturation")
            axis.grid(alpha=0.3)
        axes[0, 0].legend(fontsize=7)
        figure.suptitle(path.stem)
        figure.tight_layout()
        target = Path(options.images) / f"schedulers-{path.stem}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=80)
        plt.close(figure)


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
