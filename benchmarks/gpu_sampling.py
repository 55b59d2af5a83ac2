"""Check and time sampling on a GPU.

    python benchmarks/gpu_sampling.py check time

`check` compares tokens and log probabilities with the CPU sampler over a vocabulary of 128,256, and
sees that a step neither waits for the device, nor allocates, and replays from a captured graph.
`time` measures steps as replayed graphs over logits that exceed the L2 cache together, beside the
bytes that have to be read; `kernels` says which launch the time goes to; `tiles` compares tiles.
Without an installed Tokenpod or msgspec it makes do with the folders beside this one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

try:
    import tokenpod
except ImportError:
    tokenpod = types.ModuleType("tokenpod")
    tokenpod.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["tokenpod"] = tokenpod

try:
    import msgspec
except ImportError:

    class Struct:
        """As much of msgspec's as sampling parameters need."""

        def __init_subclass__(cls, **options: object) -> None:
            pass

        def __init__(self, **values: object) -> None:
            for name in type(self).__annotations__:
                setattr(self, name, values.get(name, getattr(type(self), name, None)))

    msgspec = types.ModuleType("msgspec")
    msgspec.Struct = Struct
    sys.modules["msgspec"] = msgspec

from tokenpod.core.new_row import NewRow
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams
from tokenpod.engine.device_sampler import DeviceSampler, Launches, Tiles
from tokenpod.engine.host_sampler import HostSampler
from tokenpod.engine.sampler import Sampler, Samples

#: Measured on an H200: a read-only pass over gigabytes.
READ_BYTES_PER_SECOND = 4.617e12
VOCAB = 128_256
BATCHES = (1, 16, 64, 256)
#: Several times the L2 cache.
ROTATED_BYTES = 300 << 20
GPU = torch.device("cuda")
PENALTIES = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "relative_frequency_penalty": 1.0,
    "logit_bias": {5: 2.0, 70_000: -3.0},
}


def sampled(**changes: object) -> SamplingParams:
    return SamplingParams(do_sample=True, seed=7, temperature=0.8, **changes)


CHECKS = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(**PENALTIES),
    "temperature": sampled(),
    "watermark": sampled(watermark=True),
    "top_k 50": sampled(top_k=50),
    "top_k 5000": sampled(top_k=5000),
    "top_p 0.9": sampled(top_p=0.9),
    "top_p 1e-6": sampled(top_p=1e-6),
    "top_p 0.999": sampled(top_p=0.999),
    "min_p 0.02": sampled(min_p=0.02),
    "typical 0.9": sampled(typical_p=0.9),
    "typical 0.2": sampled(typical_p=0.2),
    "everything": sampled(
        top_k=400, top_p=0.95, min_p=0.001, typical_p=0.9, watermark=True, **PENALTIES
    ),
    "penalties": sampled(**PENALTIES),
}


def reporting(params: SamplingParams) -> SamplingParams:
    """The same, with top tokens of what is drawn from."""
    fields = {name: getattr(params, name) for name in SamplingParams.__annotations__}
    return SamplingParams(**{**fields, "top_of_processed": True})


CHECKS |= {f"{name}, reporting": reporting(params) for name, params in CHECKS.items()}
TIMED = {
    "greedy": SamplingParams(),
    "temperature": sampled(),
    "top-k 50": sampled(top_k=50),
    "top-p 0.9": sampled(top_p=0.9),
    "typical 0.9": sampled(typical_p=0.9),
    "penalties": sampled(**PENALTIES),
}
#: With five top tokens each.
TIMED_TOPS = {
    "raw": sampled(),
    "processed": reporting(sampled()),
    "raw, all": sampled(top_k=400, typical_p=0.9, **PENALTIES),
    "processed, all": reporting(sampled(top_k=400, typical_p=0.9, **PENALTIES)),
}


def say(line: str) -> None:
    print(line, flush=True)


def seat(
    sampler: Sampler,
    row: int,
    params: SamplingParams,
    *,
    top_n: int = 0,
    min_new_tokens: int = 2,
) -> None:
    stopping = StoppingParams(1, min_new_tokens, eos_token_ids=frozenset({2}))
    prompt = [1, 5, 5, 90_000]
    request = Request([0], prompt, params, stopping, logprobs=True, top_n_tokens=top_n)
    sampler.set_rows([row], [NewRow(request, stream=row)])


def draw(
    sampler: DeviceSampler,
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    launches: Launches | None = None,
) -> Samples:
    """Draw one token for each row."""
    sampler.begin(logits, rows, positions)
    return sampler.finish(logits, rows, positions, launches)


def logits_of(n: int, shape: str, seed: int = 0) -> torch.Tensor:
    """As bf16 models make them: few distinct values, many ties.

    flat: normal, of deviation 3, so that thousands of tokens matter. peaked: of deviation 1.5, but
    for one token in a thousand, as trained models'.
    """
    generator = torch.Generator(GPU).manual_seed(seed)
    logits = torch.randn((n, VOCAB), device=GPU, generator=generator)
    if shape == "flat":
        logits *= 3
    else:
        likely = torch.rand((n, VOCAB), device=GPU, generator=generator) < 1e-3
        logits = logits * 1.5 + likely * (logits * 4 + 6)
    return logits.bfloat16().float()


# -- check -------------------------------------------------------------------------------------


def check_tokens(shape: str) -> None:
    """Three steps of all kinds of rows at once, beside the CPU sampler."""
    n = len(CHECKS)
    cpu = HostSampler(rows=n, vocab_size=VOCAB)
    gpu = DeviceSampler(rows=n, vocab_size=VOCAB, device=GPU)
    for sampler in (cpu, gpu):
        for row, params in enumerate(CHECKS.values()):
            tops = row % 3 == 0 or params.top_of_processed
            seat(sampler, row, params, top_n=5 if tops else 0)
    rows = torch.arange(n, device=GPU)
    wrong, worst = [], 0.0
    for position in range(3):
        logits = logits_of(n, shape, seed=position)
        want = cpu.sample(logits.cpu(), list(range(n)), [position] * n)
        got = gpu.sample(logits, rows, torch.full((n,), position, device=GPU))
        apart = (want.logprobs - got.logprobs.cpu()).abs() / want.logprobs.abs().clamp(min=1.0)
        apart = apart.tolist()
        for row, name in enumerate(CHECKS):
            tokens = int(want.tokens[row]), int(got.tokens[row])
            if tokens[0] != tokens[1] or apart[row] > 1e-5:
                wrong.append(f"{name} at {position}: {tokens}, log probabilities {apart[row]:.1e}")
            else:
                worst = max(worst, apart[row])
        for at, ids, values in want.tops:
            found = got.top_ids[at].tolist()
            near = torch.tensor(values) - got.top_logprobs[at, : len(values)].cpu()
            if found[: len(ids)] != ids or found[len(ids) :].count(-1) != len(found) - len(ids):
                wrong.append(f"top tokens of row {at}: {ids}, {found[: len(ids) + 1]}")
            elif float(near.abs().max()) > 1e-5:
                wrong.append(f"top tokens of row {at}: log probabilities {near.abs().max():.1e}")
        # A row that differs once has another history from then on.
        if wrong:
            break
    for line in wrong:
        say(f"  DIFFERS {line}")
    say(f"tokens, {shape}: {len(wrong)} of {n} rows differ; log probabilities within {worst:.1e}")


def check_bad_rows() -> None:
    n = len(CHECKS)
    rows, positions = torch.arange(n, device=GPU), torch.zeros(n, dtype=torch.int64, device=GPU)
    clean = logits_of(n, "flat")
    want = draw_fresh(clean, rows, positions)
    for poison in (float("nan"), float("inf")):
        dirty = clean.clone()
        dirty[::2, 100_000] = poison
        tokens = draw_fresh(dirty, rows, positions)
        assert (tokens[::2] == -1).all(), f"{poison} was not seen: {tokens.tolist()}"
        assert torch.equal(tokens[1::2], want[1::2]), "others changed"
    back = torch.arange(n - 1, -1, -1, device=GPU)
    turned = draw_fresh(clean[back].contiguous(), back, positions)
    assert torch.equal(turned[back], want), "tokens depend on the order of rows"
    say("bad rows are marked, others do not change; order does not matter")


def draw_fresh(logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    gpu = DeviceSampler(rows=len(rows), vocab_size=VOCAB, device=GPU)
    for row, params in enumerate(CHECKS.values()):
        seat(gpu, row, params)
    return gpu.sample(logits, rows, positions).tokens.clone()


def check_graph() -> None:
    """No wait, no allocation, and a graph's replays equal eager steps."""
    n = len(CHECKS)
    logits, rows = logits_of(n, "flat"), torch.arange(n, device=GPU)
    positions = torch.zeros(n, dtype=torch.int64, device=GPU)
    eager = DeviceSampler(rows=n, vocab_size=VOCAB, device=GPU)
    replayed = DeviceSampler(rows=n, vocab_size=VOCAB, device=GPU)
    everything = Launches(draws=True, tops=True, processed_tops=True)
    draw(replayed, logits, rows, positions, everything)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        samples = draw(replayed, logits, rows, positions, everything)
    for sampler in (eager, replayed):
        for row, params in enumerate(CHECKS.values()):
            seat(sampler, row, params, top_n=3)
    for position in range(4):
        positions.fill_(position)
        graph.replay()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        want = draw(eager, logits, rows, positions, everything)
        torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "a step allocates"
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
            a, b = getattr(want, name), getattr(samples, name)
            assert torch.equal(a, b), f"{name} of a replay differ at {position}"
    say("a step neither waits nor allocates; a captured one replays alike")


# -- time --------------------------------------------------------------------------------------


@dataclass
class Step:
    """One kind of rows, over logits in rotation."""

    name: str
    n: int
    shape: str
    tiles: Tiles

    def __post_init__(self) -> None:
        sets = max(3, min(256, ROTATED_BYTES // (self.n * VOCAB * 4)))
        self.logits = [logits_of(self.n, self.shape, seed) for seed in range(min(sets, 16))]
        self.logits += [self.logits[i % 16].clone() for i in range(sets - len(self.logits))]
        self.sampler = DeviceSampler(rows=self.n, vocab_size=VOCAB, device=GPU, tiles=self.tiles)
        params, top_n = TIMED.get(self.name), 0
        if params is None:
            params, top_n = TIMED_TOPS[self.name], 5
        for row in range(self.n):
            seat(self.sampler, row, params, top_n=top_n, min_new_tokens=0)
        self.rows = torch.arange(self.n, device=GPU)
        self.positions = torch.full((self.n,), 5, device=GPU)

    @property
    def limit(self) -> float:
        """Seconds that reading what must be read takes."""
        width = 8 if self.name == "penalties" else 4
        return self.n * VOCAB * width / READ_BYTES_PER_SECOND

    def run(self) -> None:
        for logits in self.logits:
            draw(self.sampler, logits, self.rows, self.positions)

    def seconds(self) -> float:
        """Of one step."""
        draw(self.sampler, self.logits[0], self.rows, self.positions)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return timed(graph.replay) / len(self.logits)


def timed(call: Callable[[], object]) -> float:
    """Median seconds of a call."""
    call()
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def steps(tiles: Tiles) -> Iterator[Step]:
    for name in TIMED:
        for shape in ("flat", "peaked"):
            if shape == "peaked" and name in ("greedy", "penalties"):
                continue  # these read the same whatever it says
            for n in BATCHES:
                yield Step(name, n, shape, tiles)


def measure() -> None:
    say(f"{'case':13s} {'logits':7s}" + "".join(f"{f'n = {n}':>18s}" for n in BATCHES))
    line = ""
    for step in steps(Tiles()):
        try:
            seconds = step.seconds()
            cell = f"{seconds * 1e6:8.1f} µs {step.limit / seconds:6.1%}"
        except Exception as error:
            cell = f"{type(error).__name__} {str(error)[:60]}"
        if step.n == BATCHES[0]:
            line = f"{step.name:13s} {step.shape:7s}"
        line += cell.rjust(18)
        if step.n == BATCHES[-1]:
            say(line)


def measure_tops() -> None:
    """Steps with top tokens of raw logits, beside those of what is drawn from."""
    say(f"{'top tokens':16s}" + "".join(f"{f'n = {n}':>14s}" for n in BATCHES))
    for name in TIMED_TOPS:
        cells = [Step(name, n, "flat", Tiles()).seconds() * 1e6 for n in BATCHES]
        say(f"{name:16s}" + "".join(f"{cell:11.1f} µs" for cell in cells))


def measure_kernels() -> None:
    from torch.profiler import ProfilerActivity, profile

    for name in TIMED:
        for n in (1, 64, 256):
            step = Step(name, n, "flat", Tiles())
            step.run()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step.run()
                torch.cuda.synchronize()
            parts = [
                f"{event.key[:12]} {event.self_device_time_total / len(step.logits):.1f}"
                for event in profiler.key_averages()
                if event.self_device_time_total
            ]
            say(f"{name:13s} n = {n:3d}: {', '.join(parts)} µs")


def compare_tiles() -> None:
    usual = Tiles()
    variants = [
        usual,
        replace(usual, split=1024),
        replace(usual, split=4096, warps=8),
        replace(usual, warps=8),
        replace(usual, block=1024, pivots=4, finish_warps=8),
        replace(usual, block=1024, pivots=8, finish_warps=8),
        replace(usual, block=512, pivots=16, finish_warps=8),
    ]
    for tiles in variants:
        cells = []
        for name in ("greedy", "temperature", "top-k 50", "top-p 0.9"):
            for n in (1, 64):
                step = Step(name, n, "flat", tiles)
                cells.append(f"{name[:6]} {n}: {step.seconds() * 1e6:.1f}")
        say(f"{tiles}\n    {', '.join(cells)} µs")


PARTS = {
    "check": [
        lambda: check_tokens("flat"),
        lambda: check_tokens("peaked"),
        check_bad_rows,
        check_graph,
    ],
    "time": [measure, measure_tops],
    "kernels": [measure_kernels],
    "tiles": [compare_tiles],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in parser.parse_args().parts:
        began = time.monotonic()
        for part in PARTS[name]:
            try:
                part()
            except Exception:
                torch.cuda.set_sync_debug_mode("default")
                say(traceback.format_exc(limit=-4))
        say(f"-- {name}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
