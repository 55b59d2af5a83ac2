"""Check and time the products of a decode step on a GPU, and find their tiles.

    python -P benchmarks/gpu_products.py check          # against float64
    python -P benchmarks/gpu_products.py time           # every shape, rows and tile; whole steps
    python -P benchmarks/gpu_products.py time --save kernels/triton/tiles.json --log all.json

The shapes are those of an 8B Llama in bfloat16, 32 layers of them, so that no weight is in the L2
cache when it is asked for again. Everything is timed as it runs in serving: captured in a graph.
Products are timed with what the model does next to them (norm, gate, sum), because that is what
the choice is between; the share is that of reading the weight alone at READ_RATE.
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
from torch.nn import functional


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

from tokenpod.kernels import reference  # noqa: E402
from tokenpod.kernels.compose import add_linear_of, norm_linear_of  # noqa: E402
from tokenpod.kernels.ops import Linear  # noqa: E402
from tokenpod.kernels.pointwise_ops import Activation, RowNorm  # noqa: E402
from tokenpod.kernels.triton import launch, pointwise, product, rotary  # noqa: E402
from tokenpod.kernels.triton.tiles import LIBRARY, Kind, Tile, Tiles, measured, parse  # noqa: E402

#: Bytes a second that a plain read reaches on one H200.
READ_RATE = 4.617e12
LAYERS = 32
#: Ranks that share the model, `--ranks N`: the shapes are one rank's, and there is one GPU.
RANKS = int(sys.argv[sys.argv.index("--ranks") + 1]) if "--ranks" in sys.argv else 1
HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336 // RANKS, 128256 // RANKS
HEADS, KV_HEADS, HEAD_DIM = 32 // RANKS, 8 // RANKS, 128
ROWS = (1, 2, 4, 8, 16, 32, 64)
EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """A weight [n, k] and what the model does next to its product."""

    name: str
    n: int
    k: int
    beside: str

    @property
    def bytes(self) -> int:
        return self.n * self.k * 2


SHAPES = (
    Shape("qkv", (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, "norm"),
    Shape("output", HIDDEN, HEADS * HEAD_DIM, "add"),
    Shape("gate_up", 2 * INTERMEDIATE, HIDDEN, "gate"),
    Shape("down", HIDDEN, INTERMEDIATE, "add"),
    Shape("head", VOCABULARY, HIDDEN, "nothing"),
)


def multiply_add(n: int, k: int, warps: int, stages: int = 1, ahead: int = 2048) -> Tile:
    return Tile(Kind.MULTIPLY_ADD, n, k, warps, stages, ahead)


def matrix(n: int, k: int, warps: int, stages: int, ahead: int = 1024) -> Tile:
    return Tile(Kind.MATRIX, n, k, warps, stages, ahead)


ONE_ROW = [
    multiply_add(2, 1024, 4),
    multiply_add(4, 1024, 4),
    multiply_add(8, 1024, 4),
    multiply_add(2, 2048, 4),
    multiply_add(4, 2048, 8),
    multiply_add(4, 512, 2),
    multiply_add(8, 512, 2),
    multiply_add(2, 4096, 8, ahead=0),
    multiply_add(4, 1024, 4, stages=3),
    multiply_add(4, 1024, 4, stages=4),
    multiply_add(8, 1024, 4, stages=3),
    multiply_add(4, 2048, 8, stages=3),
    multiply_add(8, 512, 2, stages=4),
    multiply_add(4, 1024, 4, ahead=0),
    multiply_add(4, 1024, 4, ahead=8192),
]
FEW_ROWS = [
    multiply_add(1, 1024, 4),
    multiply_add(2, 1024, 4),
    multiply_add(4, 512, 2),
    multiply_add(2, 512, 2, stages=4),
    multiply_add(2, 1024, 4, stages=4),
]
MORE_ROWS = [
    matrix(16, 256, 1, 4),
    matrix(16, 512, 2, 4),
    matrix(32, 256, 2, 4),
    matrix(64, 128, 4, 4),
    matrix(64, 128, 4, 6),
    matrix(64, 256, 4, 3),
    matrix(128, 64, 4, 5),
    matrix(128, 128, 4, 3),
    matrix(128, 128, 8, 3),
]


def tiles_for(rows: int) -> list[Tile]:
    if rows == 1:
        return [*ONE_ROW, *MORE_ROWS[:4]]
    return [*(FEW_ROWS if rows <= 4 else []), *MORE_ROWS]


def only(tile: Tile) -> Tiles:
    return Tiles({}, [(1 << 30, tile)])


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def composite(
    shape: Shape, weight: torch.Tensor, norm: RowNorm, tiles: Tiles | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x, residual) -> what the model gets there, as serving would make it with `tiles`."""
    if shape.beside == "add":
        add = product.prepare_add_linear(weight, None, tiles)

        def added(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            add(x, residual)
            return residual

        return added
    if shape.beside == "nothing":
        plain = product.prepare_linear(weight, None, tiles)
        return lambda x, residual: plain(x)
    activation = Activation.SILU if shape.beside == "gate" else None
    normed = product.prepare_norm_linear(weight, None, norm, activation, tiles)
    return lambda x, residual: normed(x)


# --- Compiling ahead, on all cores, into Triton's cache on disk.


Job = tuple[int, Shape, Tile]


def compile_one(rows: int, shape: Shape, tile: Tile) -> str | None:
    """Make one kernel by running it; what went wrong, if anything."""
    try:
        x, residual = draw(rows, shape.k), draw(rows, shape.n)
        norm = RowNorm(draw(shape.k), EPSILON)
        composite(shape, draw(shape.n, shape.k), norm, only(tile))(x, residual)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{rows} rows, {shape.beside}, {brief(tile)}: {str(error).splitlines()[0][:150]}"
    return None


def compile_all(jobs: list[Job]) -> set[Job]:
    """Compile every job's kernel; the jobs that can't be."""
    jobs = [job for job in dict.fromkeys(jobs) if job[2].kind is not Kind.LIBRARY]
    began, broken = time.perf_counter(), set()
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for job, problem in zip(jobs, pool.map(compile_one, *zip(*jobs, strict=True)), strict=True):
            if problem:
                broken.add(job)
                print(f"left out: {problem}", flush=True)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return broken


def small(shape: Shape, tile: Tile) -> Shape:
    """A shape with the same kernel as `shape`, but hardly any work."""
    return Shape("small", 512, 2 * tile.block_k, shape.beside)


# --- Timing.


@contextmanager
def overlap(wanted: bool) -> Iterator[None]:
    """Let kernels start before their predecessor has ended, or not."""
    users = (product, pointwise, rotary)
    before = [user.launch_options for user in users]
    for user in users:
        user.launch_options = lambda device: launch.options(wanted)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for user, options in zip(users, before, strict=True):
            user.launch_options = options  # type: ignore[attr-defined]


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def seconds(run: Callable[[], None], replays: int = 12, rounds: int = 3) -> float:
    """Of one run, in a graph: the median of a few rounds of replays."""
    graph = captured(run)
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays * 1e-3)
    return statistics.median(times)


@dataclass
class Model:
    """The weights of a whole model, random."""

    weights: dict[str, list[torch.Tensor]]
    norm: RowNorm


def make_model() -> Model:
    weights = {
        s.name: [draw(s.n, s.k, scale=s.k**-0.5) for _ in range(1 if s.name == "head" else LAYERS)]
        for s in SHAPES
    }
    return Model(weights, RowNorm(1 + draw(HIDDEN, scale=0.1), EPSILON))


def time_product(model: Model, shape: Shape, rows: int, tile: Tile) -> float:
    """Seconds of one product and what is next to it, one after the other over all layers."""
    x, residual = draw(rows, shape.k), draw(rows, shape.n)
    runs = [composite(shape, w, model.norm, only(tile)) for w in model.weights[shape.name]]
    runs *= max(1, round(1.5e9 / (shape.bytes * len(runs))))

    def run() -> None:
        for one in runs:
            one(x, residual)

    return seconds(run) / len(runs)


def brief(tile: Tile) -> str:
    if tile.kind is Kind.LIBRARY:
        return "library"
    tuning = f"w{tile.warps} s{tile.stages} a{tile.ahead}"
    return f"{tile.kind.value} {tile.block_n}x{tile.block_k} {tuning}"


def find_tiles(model: Model, broken: set[Job], log: list[dict[str, Any]]) -> dict[str, Any]:
    """Time all variants, into `log`; the table of the best."""
    shapes: list[dict[str, Any]] = []
    for shape in SHAPES:
        best_by_rows = []
        for rows in ROWS:
            timed: dict[Tile, float] = {}
            for tile in [LIBRARY, *tiles_for(rows)]:
                if (rows, small(shape, tile), tile) in broken:
                    continue
                with reporting(f"{shape.name}, {rows} rows, {brief(tile)}"):
                    timed[tile] = time_product(model, shape, rows, tile)
            ranked = sorted(timed, key=timed.__getitem__)
            log += [{"shape": shape.name, "us": timed[t] * 1e6, **entry(rows, t)} for t in ranked]
            shown = [*ranked[: 3 if rows == 1 else 1], LIBRARY]
            for tile in dict.fromkeys(tile for tile in shown if tile in timed):
                rate = shape.bytes / timed[tile]
                print(
                    f"{shape.name:8s} {rows:3d} rows {timed[tile] * 1e6:8.2f} us "
                    f"{rate / 1e12:5.2f} TB/s {rate / READ_RATE:4.0%}  {brief(tile)}",
                    flush=True,
                )
            best_by_rows += [entry(rows, tile) for tile in ranked[:1]]
        shapes.append({"n": shape.n, "k": shape.k, "tiles": best_by_rows})
    return {"shapes": shapes}


def entry(rows: int, tile: Tile) -> dict[str, Any]:
    if tile.kind is Kind.LIBRARY:
        return {"rows": rows, "kind": tile.kind.value}
    return {"rows": rows, **asdict(tile), "kind": tile.kind.value}


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """One failing case must not end the rest."""
    try:
        yield
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if os.environ.get("TRACE"):
            traceback.print_exc()


# --- Whole steps.

Step = Callable[[torch.Tensor], torch.Tensor]


def layers(model: Model) -> list[tuple[torch.Tensor, ...]]:
    names = ("qkv", "output", "gate_up", "down")
    return list(zip(*(model.weights[name] for name in names), strict=True))


def library_only(model: Model) -> Step:
    """The library's products and nothing else: the figure to compare others' with."""

    def step(residual: torch.Tensor) -> torch.Tensor:
        gated = residual.new_empty(len(residual), INTERMEDIATE)
        for qkv, output, gate_up, down in layers(model):
            functional.linear(residual, qkv)
            functional.linear(residual, output)
            functional.linear(residual, gate_up)
            functional.linear(gated, down)
        return functional.linear(residual, model.weights["head"][0])

    return step


def decode_step(model: Model, rows: int, tiles: Tiles | None, composed: bool = False) -> Step:
    """All of a step but attention: queries stand in for what it returns.

    `composed` makes norm and gate kernels of their own.
    """

    def prepare(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return product.prepare_linear(weight, bias, tiles)

    norm_linear: Any = norm_linear_of(prepare, pointwise.rms_norm, pointwise.act_mul)
    add_linear: Any = add_linear_of(prepare)
    if not composed:

        def norm_linear(*args: Any) -> Linear:
            return product.prepare_norm_linear(*args, tiles)

        def add_linear(*args: Any) -> Any:
            return product.prepare_add_linear(*args, tiles)

    made = [
        (
            norm_linear(qkv, None, model.norm, None),
            add_linear(output, None),
            norm_linear(gate_up, None, model.norm, Activation.SILU),
            add_linear(down, None),
        )
        for qkv, output, gate_up, down in layers(model)
    ]
    head = prepare(model.weights["head"][0], None)
    pool = draw(2, rows, KV_HEADS, HEAD_DIM)
    slots = torch.arange(rows, device="cuda")
    frequencies = 5e5 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)

    def step(residual: torch.Tensor) -> torch.Tensor:
        rotation = rotary.rotate(slots, frequencies, 1.0, torch.bfloat16)
        for qkv, output, gate_up, down in made:
            q = rotary.store_key_value(qkv(residual), rotation, None, pool[0], pool[1], slots)
            output(q.flatten(1), residual)
            down(gate_up(residual), residual)
        return head(pointwise.rms_norm(residual, *model.norm))

    return step


def time_step(step: Step, start: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds, and the logits of the last of many replays: all must be alike."""
    logits: list[torch.Tensor] = []

    def run() -> None:
        logits[:] = [step(start.clone())]

    return seconds(run), logits[0]


def time_steps(model: Model, found: Tiles) -> None:
    total = sum(w.nbytes for ws in model.weights.values() for w in ws)
    limit = total / READ_RATE
    print(f"\nall products of a step: {total / 1e9:.2f} GB, limit {limit * 1e3:.3f} ms")
    for rows in ROWS:
        start = draw(rows, HIDDEN)
        ways: dict[str, tuple[Step, bool]] = {
            "library, products only": (library_only(model), False),
            "library + our other kernels": (decode_step(model, rows, only(LIBRARY)), False),
            "best tiles, composed": (decode_step(model, rows, found, composed=True), False),
            "best tiles, fused": (decode_step(model, rows, found), False),
            "best tiles, fused, overlapping": (decode_step(model, rows, found), True),
        }
        outcomes: dict[str, torch.Tensor] = {}
        for name, (step, overlapping) in ways.items():
            with reporting(f"step, {rows} rows, {name}"), overlap(overlapping):
                taken, logits = time_step(step, start)
                outcomes[name] = logits.double()
                print(f"{rows:3d} rows {taken * 1e3:7.3f} ms {limit / taken:4.0%}  {name}")
        with reporting(f"comparison, {rows} rows"):
            fused, expected = outcomes["best tiles, fused"], outcomes["library + our other kernels"]
            same = torch.equal(fused, outcomes["best tiles, fused, overlapping"])
            print(
                f"{'':8s} fused against library {distance(fused, expected):.1e}; "
                f"overlapping {'is the same' if same else 'DIFFERS: a race'}",
                flush=True,
            )


def pointwise_cases(rows: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Name -> the bytes that must move, and the call."""
    x, residual, gate_up = draw(rows, HIDDEN), draw(rows, HIDDEN), draw(rows, 2 * INTERMEDIATE)
    weight, narrow = draw(HIDDEN), draw(rows, INTERMEDIATE)
    qkv = draw(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    keys, values = draw(9000, KV_HEADS, HEAD_DIM), draw(9000, KV_HEADS, HEAD_DIM)
    slots = torch.randperm(9000, device="cuda")[:rows]
    positions = torch.arange(rows, device="cuda")
    frequencies = 5e5 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    rotation = rotary.rotate(positions, frequencies, 1.0, torch.bfloat16)
    output, down = draw(HIDDEN, HIDDEN, scale=0.01), draw(HIDDEN, INTERMEDIATE, scale=0.01)

    def store() -> torch.Tensor:
        return rotary.store_key_value(qkv, rotation, None, keys, values, slots)

    return {
        "rms_norm": (2 * x.nbytes, lambda: pointwise.rms_norm(x, weight, EPSILON)),
        "act_mul": (gate_up.nbytes * 3 // 2, lambda: pointwise.act_mul(gate_up, Activation.SILU)),
        "store_key_value": (2 * qkv.nbytes, store),
        "embed": (2 * x.nbytes, lambda: pointwise.embed(residual, positions)),
        "sum alone": (3 * x.nbytes, lambda: residual.add_(x)),
        "library output": (0, lambda: functional.linear(x, output)),
        "library output, added": (0, lambda: residual.addmm_(x, output.t())),
        "library down": (0, lambda: functional.linear(narrow, down)),
        "library down, added": (0, lambda: residual.addmm_(narrow, down.t())),
    }


def time_pointwise() -> None:
    print("\nkernels beside products")
    for rows in (1, 64, 1024, 8192):
        for name, (moved, call) in pointwise_cases(rows).items():
            with reporting(f"{name}, {rows} rows"):
                calls = 20 if moved or rows < 1024 else 4

                def run(call: Callable[[], object] = call, calls: int = calls) -> None:
                    for _ in range(calls):
                        call()

                taken = seconds(run) / calls
                rate = f"{moved / taken / 1e12:5.2f} TB/s" if moved else " " * 10
                print(f"{rows:5d} rows {taken * 1e6:8.2f} us {rate}  {name}", flush=True)


# --- Checking.


def distance(got: torch.Tensor, truth: torch.Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def check() -> int:
    """Every composite with every tile at odd shapes, and the measured table at the model's."""
    wrong = done = 0
    odd = [Shape("odd", 1034, 1000, beside) for beside in ("norm", "add", "gate", "nothing")]
    cases: list[tuple[int, Shape, Tiles | None, str]] = [
        (rows, shape, only(tile), brief(tile))
        for rows in (1, 3, 7, 33)
        for shape in odd
        for tile in [LIBRARY, *{1: ONE_ROW, 3: FEW_ROWS}.get(rows, []), *MORE_ROWS[::3]]
    ]
    cases += [(rows, shape, None, "measured") for rows in (1, 2, 5, 16, 40) for shape in SHAPES]
    compile_all([(rows, shape, tiles.otherwise[0][1]) for rows, shape, tiles, _ in cases if tiles])
    for rows, shape, tiles, name in cases:
        with reporting(f"check {rows} rows, {shape}, {name}"):
            error = error_of(rows, shape, tiles)
            done += 1
            if not error < 2e-2:
                wrong += 1
                print(f"WRONG {rows} rows, {shape}, {name}: {error:.2e}", flush=True)
    print(f"checked {done} of {len(cases)} cases, {wrong} wrong")
    return int(wrong > 0 or done < len(cases))


def error_of(rows: int, shape: Shape, tiles: Tiles | None) -> float:
    x, weight = draw(rows, shape.k), draw(shape.n, shape.k, scale=shape.k**-0.5)
    norm = RowNorm(draw(shape.k), EPSILON)
    residual = draw(rows, shape.n)
    wide = x.double()
    if shape.beside in ("norm", "gate"):
        wide = reference.rms_norm(wide, norm.weight.double(), EPSILON)
    truth = torch.cat([wide @ part.double().T for part in weight.split(8192)], dim=1)
    if shape.beside == "gate":
        truth = reference.act_mul(truth, Activation.SILU)
    if shape.beside == "add":
        truth += residual.double()
    return distance(composite(shape, weight, norm, tiles)(x, residual), truth)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["check", "time"])
    parser.add_argument("--save", type=Path, help="write the best tiles here, else print them")
    parser.add_argument("--ranks", type=int, default=1, help="find tiles for one of so many ranks")
    parser.add_argument("--log", type=Path, help="write every variant's time here")
    options = parser.parse_args()
    torch.manual_seed(3)
    print(torch.cuda.get_device_name(), torch.__version__)
    if options.what == "check":
        return check()
    broken = compile_all(
        [(rows, small(s, tile), tile) for rows in ROWS for s in SHAPES for tile in tiles_for(rows)]
    )
    with torch.inference_mode():
        model = make_model()
        log: list[dict[str, Any]] = []
        table = find_tiles(model, broken, log)
        capability = torch.cuda.get_device_capability()
        otherwise = [entry(rows, tile) for rows, tile in measured(capability).otherwise]
        table = {"capability": capability, **table, "otherwise": otherwise}
        if options.log:
            options.log.write_text(json.dumps(log))
        if options.save:
            options.save.write_text(json.dumps(table, indent=1) + "\n")
        else:
            print(json.dumps(table))
        time_steps(model, parse(table))
        time_pointwise()
    return 0


if __name__ == "__main__":
    sys.exit(main())
