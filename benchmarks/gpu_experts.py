"""Check and time mixtures of experts on a GPU, and compare their tiles.

    python -P benchmarks/gpu_experts.py                 # check, then time
    python -P benchmarks/gpu_experts.py check
    python -P benchmarks/gpu_experts.py time --log all.json

One layer's block of Mixtral 8x7B and of Qwen3-30B-A3B in bfloat16, for steps of 1 to 2048 tokens.
Everything is timed as it runs in serving: captured in a graph, several inputs one after the other,
so that few tokens do not find their experts in the L2 cache.

The limit is the longer of two times: reading the weights of the experts that were chosen at
READ_RATE, and their operations at MATRIX_RATE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


def find_tokenpod() -> None:
    """Make `tokenpod` importable from a checkout that is not installed."""
    try:
        import tokenpod.kernels  # noqa: F401
    except ImportError:
        root = Path(__file__).resolve().parent.parent
        package = Path(tempfile.mkdtemp()) / "tokenpod"
        package.mkdir()
        for folder in ("engine", "kernels", "models", "scheduler"):
            (package / folder).symlink_to(root / folder)
        sys.path.insert(0, str(package.parent))


find_tokenpod()

from tokenpod.kernels.expert_ops import ExpertWeights, Routing  # noqa: E402
from tokenpod.kernels.pointwise_ops import Activation, RowNorm  # noqa: E402
from tokenpod.kernels.reference.experts import choose, mixture  # noqa: E402
from tokenpod.kernels.triton.expert_routing import Assignments, assign  # noqa: E402
from tokenpod.kernels.triton.expert_tiles import (  # noqa: E402
    TOKEN_TILE,
    ProductTile,
    Tile,
    TokenTile,
    choose_tile,
    table_for,
)
from tokenpod.kernels.triton.expert_token import (  # noqa: E402
    down_for_one,
    gate_up_for_one,
)
from tokenpod.kernels.triton.experts import multiply, prepare_experts  # noqa: E402
from tokenpod.kernels.triton.launch import capability  # noqa: E402
from tokenpod.kernels.triton.pointwise import rms_norm  # noqa: E402

#: Bytes a second that a plain read reaches on one H200, and its operations a second in bfloat16.
READ_RATE, MATRIX_RATE = 4.617e12, 686e12
DEVICE = torch.device("cuda")
TOKENS = (1, 16, 64, 256, 2048)
#: Inputs that follow one another in a graph.
INPUTS = 4
EPSILON = 1e-6


@dataclass(frozen=True)
class Layer:
    """The sparse block of a model."""

    name: str
    experts: int
    routing: Routing
    hidden: int
    width: int

    def read_seconds(self, experts_read: float) -> float:
        """To read so many experts."""
        return experts_read * 3 * self.width * self.hidden * 2 / READ_RATE

    def matrix_seconds(self, tokens: int) -> float:
        """To multiply so many tokens."""
        count = tokens * self.routing.per_token
        return 2 * count * 3 * self.width * self.hidden / MATRIX_RATE


MIXTRAL = Layer("Mixtral-8x7B", 8, Routing(2, True), 4096, 14336)
QWEN3 = Layer("Qwen3-30B-A3B", 128, Routing(8, True), 2048, 768)
LAYERS = (MIXTRAL, QWEN3)

#: Candidates by tokens of a block: for few tokens those that keep most bytes in flight.
#: A block of 1 is a step of one token, which has kernels of its own.
CANDIDATES: dict[int, list[ProductTile]] = {
    1: [
        ProductTile(4, 1024, 4, 1),
        ProductTile(8, 1024, 4, 1),
        ProductTile(8, 512, 4, 1),
        ProductTile(4, 512, 2, 3),
        ProductTile(4, 512, 2, 4),
        ProductTile(8, 512, 2, 4),
        ProductTile(16, 512, 2, 4),
        ProductTile(8, 512, 4, 3),
        ProductTile(16, 256, 4, 3),
        ProductTile(4, 1024, 4, 3),
        ProductTile(4, 1024, 4, 4),
    ],
    16: [
        ProductTile(64, 128, 4, 4),
        ProductTile(64, 256, 4, 3),
        ProductTile(64, 256, 4, 2),
        ProductTile(64, 128, 2, 5),
        ProductTile(128, 128, 4, 3),
        ProductTile(128, 64, 4, 5),
        ProductTile(128, 128, 8, 4),
    ],
    32: [
        ProductTile(128, 64, 4, 5),
        ProductTile(128, 128, 4, 3),
        ProductTile(64, 128, 4, 4),
        ProductTile(128, 128, 8, 4),
        ProductTile(256, 64, 8, 4),
    ],
    64: [
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 128, 4, 3),
        ProductTile(128, 64, 8, 4),
        ProductTile(256, 64, 8, 3),
        ProductTile(256, 64, 8, 4),
    ],
    128: [
        ProductTile(256, 64, 8, 3),
        ProductTile(256, 64, 8, 4),
        ProductTile(128, 64, 4, 3),
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 64, 8, 4),
        ProductTile(128, 128, 8, 3),
    ],
}


def block_sizes(layer: Layer, tokens: int) -> list[int]:
    """The sizes of a block that are near an expert's tokens on average."""
    if tokens == 1:
        return [1]
    sizes = [size for size in CANDIDATES if size > 1]
    mean = tokens * layer.routing.per_token / layer.experts
    near = [size for size in sizes if mean / 2 <= size <= 2 * mean]
    return near or [min(sizes) if mean < min(sizes) else max(sizes)]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale


def make_weights(layer: Layer) -> ExpertWeights:
    return ExpertWeights(
        draw(layer.experts, layer.hidden, scale=layer.hidden**-0.5),
        draw(layer.experts, 2 * layer.width, layer.hidden, scale=layer.hidden**-0.5),
        draw(layer.experts, layer.hidden, layer.width, scale=layer.width**-0.5),
    )


def make_norm(layer: Layer) -> RowNorm:
    return RowNorm(1 + draw(layer.hidden, scale=0.1), EPSILON)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """A case that fails says so; the others go on."""
    try:
        yield
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        traceback.print_exc(limit=3, file=sys.stdout)


# --- Checking.


def check(layers: tuple[Layer, ...] = LAYERS, tokens: tuple[int, ...] = TOKENS) -> int:
    """Blocks against float64, twice each, and the table of assignments; 1 if any is wrong.

    The norm is the kernel's: its rounding may not choose other experts.
    """
    done, wrong = 0, 0
    for layer in layers:
        weights, norm = make_weights(layer), make_norm(layer)
        block = prepare_experts(weights, norm, Activation.SILU, layer.routing)
        wide = ExpertWeights(*(weight.double() for weight in weights))
        for count in tokens:
            with reporting(f"check {layer.name}, {count} tokens"):
                residual = draw(count, layer.hidden)
                got, again = residual.clone(), residual.clone()
                block(got)
                block(again)
                x = rms_norm(residual, norm.weight, norm.epsilon)
                truth = residual.double()
                truth += mixture(x.double(), wide, Activation.SILU, layer.routing)
                error = ((got.double() - truth).norm() / truth.norm()).item()
                right = error < 1e-2 and torch.equal(got, again)
                right = right and table_is_right(layer, x, weights.router)
                done, wrong = done + 1, wrong + (not right)
                print(f"{'ok' if right else 'WRONG'} {layer.name}, {count} tokens: {error:.1e}")
        del weights, wide, block
    print(f"checked {done} of {len(layers) * len(tokens)} cases, {wrong} wrong", flush=True)
    return int(wrong > 0 or done < len(layers) * len(tokens))


def table_is_right(layer: Layer, x: torch.Tensor, router: torch.Tensor) -> bool:
    """Sorted, and of the experts that float64 chooses but for a tie in a thousand tokens."""
    got = assign(x, router, layer.routing)
    order = got.order.long()
    positions = torch.arange(len(order), device=order.device)
    by_position = torch.searchsorted(got.start.long(), positions, right=True) - 1
    flat = torch.empty_like(order).scatter_(0, order, by_position)
    _, chosen = choose(x.double() @ router.double().T, layer.routing)
    same = (flat.view_as(chosen) == chosen.sort(dim=1).values).all(dim=1)
    return torch.equal(order, flat.argsort(stable=True)) and same.double().mean().item() > 0.999


# --- Compiling ahead, on all cores, into Triton's cache on disk.


@dataclass(frozen=True)
class Job:
    """One of a block's two products with one tile."""

    layer: Layer
    gated: bool
    block_t: int
    tile: ProductTile

    def __str__(self) -> str:
        tile = self.tile
        part = "gate_up" if self.gated else "down"
        shape = f"{self.block_t}x{tile.block_n}x{tile.block_k}"
        return f"{part} {shape}, {tile.warps} warps, {tile.stages} stages"


def all_jobs() -> list[Job]:
    return [
        Job(layer, gated, size, tile)
        for layer in LAYERS
        for size in sorted({s for count in TOKENS for s in block_sizes(layer, count)})
        for tile in CANDIDATES[size]
        for gated in (True, False)
    ]


def compile_one(job: Job) -> str | None:
    """Make one kernel by running it on few small experts; what went wrong, if anything."""
    try:
        layer, per_token = job.layer, job.layer.routing.per_token
        n, k = 64, layer.hidden if job.gated else layer.width
        tokens = 1 if job.block_t == 1 else 2
        table = assign(draw(tokens, k), draw(layer.experts, k), layer.routing)
        x = draw(tokens if job.gated else tokens * per_token, k)
        rows = n * (2 if job.gated else 1)
        run_product(job, x, table, draw(layer.experts, rows, k), n)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job.layer.name}, {job}: {str(error).splitlines()[0][:150]}"
    return None


def compile_all(jobs: list[Job]) -> set[Job]:
    """Compile every job's kernel; the jobs that can't be."""
    began = time.perf_counter()
    broken: set[Job] = set()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for job, problem in zip(jobs, pool.map(compile_one, jobs), strict=True):
            if problem:
                broken.add(job)
                print(f"left out: {problem}", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return broken


def run_product(
    job: Job, x: torch.Tensor, table: Assignments, weight: torch.Tensor, n: int
) -> torch.Tensor:
    if job.block_t == 1:
        return run_product_for_one(job, x, table, weight, n)
    y = torch.empty((table.order.numel(), n), dtype=x.dtype, device=x.device)
    activation = Activation.SILU if job.gated else None
    multiply(x, weight, y, table, job.block_t, job.tile, activation)
    return y


def run_product_for_one(
    job: Job, x: torch.Tensor, table: Assignments, weight: torch.Tensor, n: int
) -> torch.Tensor:
    if job.gated:
        return gate_up_for_one(x, weight, Activation.SILU, table, job.tile)
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    down_for_one(x, weight, table, y, job.tile)
    return y


# --- Timing.


def seconds(run: Callable[[], object], least: float = 0.02) -> float:
    """Of one run, in a graph: the median of three rounds of replays of `least` seconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    replays = max(3, int(least / max(1e-6, replayed(graph, 2))))
    return statistics.median(replayed(graph, replays) for _ in range(3))


def replayed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / replays * 1e-3


@dataclass(frozen=True)
class Outcome:
    """Times of one layer and number of tokens, in seconds."""

    layer: str
    tokens: int
    experts_read: float
    limit: float
    block: float
    routing: float
    gate_up: float
    down: float
    best: dict[str, float]


def time_case(layer: Layer, weights: ExpertWeights, tokens: int, broken: set[Job]) -> Outcome:
    """The block, its routing alone, and each product alone with every tile."""
    norm = make_norm(layer)
    # Outputs too small to change the inputs, and with them the choice, from replay to replay.
    residuals = [draw(tokens, layer.hidden, scale=1000.0) for _ in range(INPUTS)]
    inputs = [rms_norm(residual, norm.weight, EPSILON) for residual in residuals]
    tables = [assign(x, weights.router, layer.routing) for x in inputs]
    block = prepare_experts(weights, norm, Activation.SILU, layer.routing)

    def blocks() -> None:
        for residual in residuals:
            block(residual)

    def routings() -> None:
        for residual in residuals:
            assign(rms_norm(residual, norm.weight, EPSILON), weights.router, layer.routing)

    def products(job: Job) -> Callable[[], None]:
        weight = weights.gate_up if job.gated else weights.down
        n = layer.width if job.gated else layer.hidden
        count = tokens * layer.routing.per_token
        xs = inputs if job.gated else [draw(count, layer.width) for _ in inputs]

        def run() -> None:
            for x, table in zip(xs, tables, strict=True):
                run_product(job, x, table, weight, n)

        return run

    times: dict[str, float] = {}
    for size in block_sizes(layer, tokens):
        for tile in CANDIDATES[size]:
            for gated in (True, False):
                job = Job(layer, gated, size, tile)
                if job not in broken:
                    with reporting(f"time {layer.name}, {tokens} tokens, {job}"):
                        times[str(job)] = seconds(products(job), 0.01) / INPUTS
    hit = statistics.mean(experts_hit(table) for table in tables)
    return Outcome(
        layer.name,
        tokens,
        hit,
        max(layer.read_seconds(hit), layer.matrix_seconds(tokens)),
        seconds(blocks) / INPUTS,
        seconds(routings) / INPUTS,
        seconds(products(in_use(layer, tokens, gated=True))) / INPUTS,
        seconds(products(in_use(layer, tokens, gated=False))) / INPUTS,
        times,
    )


def in_use(layer: Layer, tokens: int, gated: bool) -> Job:
    """The tile that serving would take."""
    tile: Tile | TokenTile = TOKEN_TILE
    size = 1
    if tokens > 1:
        table = table_for(2, capability(DEVICE))
        tile = choose_tile(table, tokens * layer.routing.per_token, layer.experts)
        size = tile.block_t
    return Job(layer, gated, size, tile.gate_up if gated else tile.down)


def experts_hit(table: Assignments) -> int:
    """Experts with at least one token."""
    ends = [*table.start.tolist()[1:], table.order.numel()]
    return sum(start < end for start, end in zip(table.start.tolist(), ends, strict=True))


def time_all(broken: set[Job]) -> list[Outcome]:
    outcomes = []
    for layer in LAYERS:
        weights = make_weights(layer)
        for tokens in TOKENS:
            with reporting(f"time {layer.name}, {tokens} tokens"):
                outcomes.append(time_case(layer, weights, tokens, broken))
        del weights
    return outcomes


def print_tiles(outcomes: list[Outcome]) -> None:
    print("\nbest tiles, tokens of a block x rows of the weight x elements; two of each product")
    for outcome in outcomes:
        for part in ("gate_up", "down"):
            ranked = sorted(
                (spent, name) for name, spent in outcome.best.items() if name.startswith(part)
            )
            shown = "; ".join(f"{name} {spent * 1e6:.1f} µs" for spent, name in ranked[:2])
            print(f"{outcome.layer:14} {outcome.tokens:5}  {shown}")


def print_table(outcomes: list[Outcome]) -> None:
    print(f"\n{torch.cuda.get_device_name()}; µs a layer; share of the limit with the tiles in use")
    print("layer          tokens experts   limit   block  share  routing  gate_up     down")
    for o in outcomes:
        times = "".join(f"{spent * 1e6:9.1f}" for spent in (o.routing, o.gate_up, o.down))
        print(
            f"{o.layer:14} {o.tokens:6} {o.experts_read:7.1f} {o.limit * 1e6:7.1f} "
            f"{o.block * 1e6:7.1f} {o.limit / o.block:6.0%}{times}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["all", "check", "time"], nargs="?", default="all")
    parser.add_argument("--log", type=Path, help="write every time here, as JSON")
    options = parser.parse_args()
    torch.manual_seed(5)
    failed = 0
    with torch.inference_mode():
        broken: set[Job] = set()
        if options.what != "check":
            with reporting("compiling ahead"):
                broken = compile_all(all_jobs())
        if options.what != "time":
            failed = check()
        if options.what == "check":
            return failed
        outcomes = time_all(broken)
    if options.log:
        log: list[dict[str, Any]] = [asdict(outcome) for outcome in outcomes]
        options.log.write_text(json.dumps(log))
    print_tiles(outcomes)
    print_table(outcomes)
    return failed


if __name__ == "__main__":
    sys.exit(main())
