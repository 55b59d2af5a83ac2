"""Time whole decode steps on a GPU, and find the tiles that are best inside one.

    python -P benchmarks/gpu_decode_step.py                     # variants, then the search
    python -P benchmarks/gpu_decode_step.py --save found.json   # the tiles found, as tiles.json
    python -P benchmarks/gpu_decode_step.py --ranks 2           # for one of two ranks, without sums

A step is that of serving: the decoder of an 8B Llama shape in bfloat16 over a paged pool, head
included, sampling left out, captured in a graph. Kernels overlap, so the fastest product alone is
not always the fastest between its neighbours: the search changes one product's tile at a time and
times the whole step. Every variant's result is compared with that of the first one, and with
itself: a kernel that does not wait for its input shows as a difference between replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_products import (
    EPSILON,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    READ_RATE,
    SHAPES,
    VOCABULARY,
    Job,
    compile_all,
    matrix,
    multiply_add,
    reporting,
    small,
)

from tokenpod.kernels.batch import ForwardBatch, PagedRows
from tokenpod.kernels.pool import KVPool, alike
from tokenpod.kernels.triton import (
    OPERATIONS,
    attention_decode,
    attention_tiles,
    launch,
    pointwise,
    product,
    rotary,
)
from tokenpod.kernels.triton.tiles import LIBRARY, Kind, Tile, Tiles, measured
from tokenpod.models.decoder import Decoder
from tokenpod.models.families.llama import LLAMA
from tokenpod.models.fields import Fields
from tokenpod.models.spec import ModelSpec

#: (rows, context) of steps whose variants are compared.
CASES = ((1, 384), (1, 8192), (4, 1024), (16, 1024), (16, 8192), (64, 1024))
#: Those that tiles are searched for.
SEARCHED = ((1, 384), (64, 1024), (16, 1024), (4, 1024))
SLOTS = max(rows * context for rows, context in CASES)
#: Adjacent slots of a row.
PIECE = 16
#: Two results that differ by rounding only, after 32 layers.
TOLERANCE = 0.06

#: By product's name.
Choice = dict[str, Tile]


def config() -> ModelSpec:
    return LLAMA.spec(
        Fields(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": VOCABULARY,
                "hidden_size": HIDDEN,
                "intermediate_size": INTERMEDIATE,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "num_key_value_heads": KV_HEADS,
                "head_dim": HEAD_DIM,
                "max_position_embeddings": 131072,
                "rms_norm_eps": EPSILON,
                "rope_theta": 500_000.0,
                "torch_dtype": "bfloat16",
            },
            "a benchmark's",
        ),
        None,
    )


def random_weights() -> dict[str, torch.Tensor]:
    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

    weights = {"embedding": draw(VOCABULARY, HIDDEN, scale=1.0)}
    weights["norm"] = draw(HIDDEN, scale=0.1).add_(1)
    for shape in SHAPES:
        ours = "up" if shape.name == "gate_up" else shape.name
        names = [f"{i}.{ours}" for i in range(LAYERS)]
        for name in ["head"] if shape.name == "head" else names:
            weights[name] = draw(shape.n, shape.k, scale=shape.k**-0.5)
    for i in range(LAYERS):
        for name in ("attention_in", "mlp_in"):
            weights[f"{i}.{name}"] = draw(HIDDEN, scale=0.1).add_(1)
    return weights


@dataclass(frozen=True)
class Stage:
    """What all variants share."""

    weights: dict[str, torch.Tensor]
    pool: KVPool

    def decoder(self, choice: Choice) -> Decoder:
        """The model with these tiles."""
        tiles = Tiles({(s.n, s.k): [(1 << 30, choice[s.name])] for s in SHAPES}, [])
        ops = replace(
            OPERATIONS,
            prepare_linear=partial(product.prepare_linear, tiles=tiles),
            prepare_norm_linear=partial(product.prepare_norm_linear, tiles=tiles),
            prepare_add_linear=partial(product.prepare_add_linear, tiles=tiles),
        )
        return Decoder(config(), dict(self.weights), ops)


def make_stage() -> Stage:
    torch.manual_seed(0)
    pool = KVPool(
        slots=SLOTS,
        layouts=[alike(KV_HEADS, HEAD_DIM)] * LAYERS,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    for tensor in [*pool.keys, *pool.values]:
        tensor.normal_()
    return Stage(random_weights(), pool)


def make_batch(rows: int, context: int) -> ForwardBatch:
    """Every row at its last position, its slots in scattered pieces."""
    torch.manual_seed(rows)
    pieces = torch.randperm(rows * context // PIECE, device="cuda")
    slots = (pieces[:, None] * PIECE + torch.arange(PIECE, device="cuda")).view(rows, context)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    return ForwardBatch(
        t_token=torch.randint(VOCABULARY, (rows,), device="cuda"),
        t_position=torch.full((rows,), context - 1, device="cuda"),
        t_slot=slots[:, -1].contiguous(),
        b_start=list(range(rows + 1)),
        b_context=[0] * rows,
        b_runs=[[]] * rows,
        b_row=[0] * rows,
        row_table=slots.to(torch.int32),
        single_rows=rows,
        logit_index=torch.arange(rows, device="cuda"),
        paged=PagedRows(
            torch.arange(rows, **int32),
            torch.arange(rows + 1, **int32),
            torch.full((rows,), context, **int32),
        ),
    )


@dataclass(frozen=True)
class Timed:
    seconds: float
    logits: torch.Tensor
    #: All replays gave the same bits.
    steady: bool


def time_step(stage: Stage, batch: ForwardBatch, choice: Choice, replays: int = 12) -> Timed:
    decoder = stage.decoder(choice)

    def run() -> torch.Tensor:
        return decoder.logits(decoder.forward(batch, stage.pool))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    graph.replay()
    first = logits.clone()
    times, steady = [], True
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays // 3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / (replays // 3) * 1e-3)
        steady &= torch.equal(first, logits)
    return Timed(statistics.median(times), first, steady)


def limit(rows: int, context: int) -> float:
    """Seconds that reading the weights and the KV takes."""
    weights = sum(s.bytes * (1 if s.name == "head" else LAYERS) for s in SHAPES)
    kv = rows * context * 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    return (weights + kv) / READ_RATE


# --- Variants.


@contextmanager
def attention_asking(blocks: int) -> Iterator[None]:
    """Decode attention asks for so many blocks before its queries are there."""
    size = (HEAD_DIM, 2)
    before = attention_tiles.TILES[size]
    decode = tuple((most, replace(tile, ahead=blocks)) for most, tile in before.decode)
    attention_tiles.TILES[size] = replace(before, decode=decode)
    try:
        yield
    finally:
        attention_tiles.TILES[size] = before


@contextmanager
def overlap(products: bool, attention: bool) -> Iterator[None]:
    """Which kernels may start before their predecessor has ended."""
    wanted = {product: products, pointwise: products, rotary: products}
    wanted[attention_decode] = attention
    before = {module: module.launch_options for module in wanted}
    for module, early in wanted.items():
        module.launch_options = lambda device, early=early: launch.options(early)
    try:
        yield
    finally:
        for module, options in before.items():
            module.launch_options = options


def table(rows: int) -> Choice:
    """The tiles of tiles.json."""
    found = measured((9, 0))
    return {s.name: found.choose(s.n, s.k, rows) for s in SHAPES}


def asking(choice: Choice, ahead: int | None = None) -> Choice:
    """The same tiles, asking in bulk, for so many bytes of each row."""
    return {
        name: replace(tile, bulk=True, ahead=tile.ahead if ahead is None else ahead)
        if tile.kind is not Kind.LIBRARY
        else tile
        for name, tile in choice.items()
    }


@dataclass(frozen=True)
class Variant:
    name: str
    choice: Choice
    products_overlap: bool = True
    attention_overlaps: bool = True
    #: Blocks that attention asks for.
    ahead: int = 0


def variants(rows: int) -> list[Variant]:
    """The first is what the others are compared with."""
    today = table(rows)
    return [
        Variant("nothing overlaps", today, False, False),
        Variant("products overlap", today, True, False),
        Variant("attention overlaps too", today),
        *[Variant(f"  and asks for {n} blocks", today, ahead=n) for n in (1, 2, 4, 8)],
        Variant("  products ask in bulk", asking(today)),
        *[Variant(f"  for {n} bytes", asking(today, n)) for n in (1024, 2048, 4096, 8192)],
        Variant("  for 2048 bytes, attention for 2 blocks", asking(today, 2048), ahead=2),
    ]


def compare_variants(stage: Stage, rows: int, context: int) -> None:
    batch, floor = make_batch(rows, context), limit(rows, context)
    print(f"\n{rows} x {context}: limit {floor * 1e3:.3f} ms", flush=True)
    base = None
    for one in variants(rows):
        with (
            reporting(one.name),
            overlap(one.products_overlap, one.attention_overlaps),
            attention_asking(one.ahead),
        ):
            timed = time_step(stage, batch, one.choice)
            base = timed if base is None else base
            print(f"  {line(timed, floor, base)}  {one.name}", flush=True)


def line(timed: Timed, floor: float, base: Timed) -> str:
    off = (timed.logits - base.logits).norm() / base.logits.norm()
    wrong = "" if timed.steady and off < TOLERANCE else "  WRONG"
    share = floor / timed.seconds
    return f"{timed.seconds * 1e3:7.3f} ms {share:4.0%}  off {off.item():.1e}{wrong}"


# --- The search.


def few(*tiles: Tile) -> list[Tile]:
    return [replace(tile, bulk=True) for tile in tiles]


def split(tile: Tile, splits: int) -> Tile:
    return replace(tile, splits=splits)


ONE_ROW = few(
    *[multiply_add(4, 1024, 4, 1, ahead) for ahead in (0, 512, 2048)],
    multiply_add(4, 1024, 4, 1, 1024),
    *[multiply_add(8, 1024, 4, 3, ahead) for ahead in (0, 1024, 2048, 3072)],
    *[multiply_add(8, 1024, 4, stages, 1024) for stages in (2, 4)],
    *[multiply_add(8, 512, 4, 4, ahead) for ahead in (1024, 2048)],
    multiply_add(4, 1024, 4, 3, 1024),
    *[multiply_add(16, 512, 4, stages, 1024) for stages in (3, 4)],
    multiply_add(16, 1024, 8, 3, 1024),
    multiply_add(8, 1024, 8, 4, 1024),
    *[multiply_add(rows, 2048, warps, 1, 0) for rows, warps in ((2, 4), (4, 4), (4, 8), (8, 8))],
    *[multiply_add(rows, 2048, 8, 3, 1024) for rows in (4, 8)],
    matrix(16, 512, 2, 4, 2048),
    matrix(32, 256, 2, 4, 2048),
)
SOME_ROWS = few(
    *[matrix(16, 512, 2, 4, ahead) for ahead in (1024, 4096)],
    *[matrix(32, 256, 2, 4, ahead) for ahead in (1024, 4096)],
    *[matrix(64, 128, 4, 4, ahead) for ahead in (1024, 4096)],
    matrix(64, 256, 4, 3, 2048),
    matrix(64, 128, 4, 8, 1024),
    matrix(64, 256, 4, 4, 1024),
    matrix(32, 256, 2, 6, 1024),
    matrix(32, 128, 2, 8, 1024),
    matrix(16, 256, 2, 8, 1024),
    matrix(128, 128, 8, 4, 1024),
    matrix(128, 128, 4, 3, 2048),
    matrix(128, 64, 4, 4, 2048),
    split(matrix(32, 256, 2, 4, 2048), 2),
    split(matrix(64, 128, 4, 4, 2048), 2),
    split(matrix(64, 128, 4, 4, 1024), 4),
    split(matrix(128, 64, 4, 5, 1024), 4),
)
MANY_ROWS = few(
    matrix(64, 128, 4, 4, 1024),
    matrix(64, 128, 4, 6, 1024),
    matrix(128, 64, 4, 5, 1024),
    matrix(128, 64, 4, 6, 1024),
    matrix(128, 64, 4, 4, 2048),
    matrix(128, 128, 8, 3, 1024),
    matrix(256, 64, 8, 4, 1024),
    split(matrix(64, 64, 4, 6, 1024), 2),
    split(matrix(64, 128, 4, 4, 1024), 2),
    split(matrix(64, 64, 4, 5, 1024), 4),
    split(matrix(128, 64, 4, 5, 1024), 2),
    split(matrix(128, 64, 4, 4, 1024), 3),
    split(matrix(128, 64, 4, 5, 1024), 4),
    split(matrix(128, 64, 4, 4, 1024), 5),
    split(matrix(128, 64, 4, 4, 1024), 8),
    split(matrix(128, 128, 4, 3, 1024), 4),
    split(matrix(256, 64, 8, 4, 1024), 8),
)


def candidates(rows: int, name: str) -> list[Tile]:
    tiles = ONE_ROW if rows == 1 else SOME_ROWS if rows <= 16 else MANY_ROWS
    if name in ("gate_up", "head"):
        tiles = [tile for tile in tiles if tile.splits == 1]
    return [*tiles, LIBRARY]


def search(stage: Stage, rows: int, context: int, until: float, broken: set[Job]) -> Choice:
    """The table's tiles, changed one by one for what makes the step faster."""
    batch, floor = make_batch(rows, context), limit(rows, context)
    best = table(rows)
    base = fastest = time_step(stage, batch, best)
    print(f"\n{rows} x {context}: {line(base, floor, base)}  the table", flush=True)
    for shape in sorted(SHAPES, key=lambda shape: ("output", "qkv", "down").count(shape.name) == 0):
        held, ranked = best[shape.name], []
        asked = replace(held, bulk=held.kind is not Kind.LIBRARY)
        for tile in [asked, *candidates(rows, shape.name)]:
            if time.perf_counter() > until or (rows, small(shape, tile), tile) in broken:
                continue
            with reporting(f"{shape.name} {brief(tile)}"):
                timed = time_step(stage, batch, {**best, shape.name: tile})
                ranked.append((timed.seconds, line(timed, floor, base), tile, timed))
        ranked.sort(key=lambda entry: entry[0])
        for _, shown, tile, _ in ranked[:4]:
            print(f"  {shown}  {shape.name:8s} {brief(tile)}", flush=True)
        for _, shown, tile, timed in ranked:
            if "WRONG" not in shown and timed.seconds < fastest.seconds:
                fastest, best = timed, {**best, shape.name: tile}
                break
    print(f"  {line(fastest, floor, base)}  found: {', '.join(map(brief, best.values()))}")
    return best


def brief(tile: Tile) -> str:
    if tile.kind is Kind.LIBRARY:
        return "library"
    bulk = "b" if tile.bulk else ""
    shape = f"{tile.block_n}x{tile.block_k} w{tile.warps} s{tile.stages} a{tile.ahead}{bulk}"
    return f"{tile.kind.value} {shape}" + (f" / {tile.splits}" if tile.splits > 1 else "")


def jobs(searches: bool) -> list[Job]:
    """Every kernel to compile."""
    made = []
    for rows, _ in CASES:
        for one in variants(rows):
            made += [(rows, small(s, one.choice[s.name]), one.choice[s.name]) for s in SHAPES]
    for rows, _ in SEARCHED if searches else ():
        for shape in SHAPES:
            made += [(rows, small(shape, t), t) for t in candidates(rows, shape.name)]
    return made


def as_table(found: dict[int, Choice]) -> dict[str, Any]:
    shapes = []
    for shape in SHAPES:
        tiles = []
        for rows, choice in sorted(found.items()):
            fields = asdict(choice[shape.name]) if choice[shape.name] is not LIBRARY else {}
            tiles.append({"rows": rows, **fields, "kind": choice[shape.name].kind.value})
        shapes.append({"n": shape.n, "k": shape.k, "tiles": tiles})
    return {"capability": [9, 0], "shapes": shapes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=90, help="stop searching after so many")
    parser.add_argument("--save", type=Path, help="write the tiles found here")
    parser.add_argument("--ranks", type=int, default=1, help="find tiles for one of so many ranks")
    parser.add_argument("--cases", nargs="*", default=[f"{r}x{c}" for r, c in CASES])
    parser.add_argument("--search", nargs="*", default=[f"{r}x{c}" for r, c in SEARCHED])
    options = parser.parse_args()
    began = time.perf_counter()
    elapsed: Callable[[], float] = lambda: time.perf_counter() - began  # noqa: E731
    broken = compile_all(jobs(searches=options.seconds > 0))
    with torch.inference_mode():
        stage = make_stage()
        print(f"ready after {elapsed():.0f} s", flush=True)
        for rows, context in CASES:
            if f"{rows}x{context}" not in options.cases:
                continue
            with reporting(f"{rows} x {context}"):
                compare_variants(stage, rows, context)
        print(
            f"\n{elapsed():.0f} s gone; every product's four best tiles, in the step:", flush=True
        )
        found: dict[int, Choice] = {}
        searched = [(r, c) for r, c in SEARCHED if f"{r}x{c}" in options.search]
        for i, (rows, context) in enumerate(searched if options.seconds > 0 else ()):
            share = (options.seconds - elapsed()) / (len(searched) - i)
            with reporting(f"search for {rows} x {context}"):
                until = time.perf_counter() + share
                found[rows] = search(stage, rows, context, until, broken)
            if options.save:
                options.save.write_text(json.dumps(as_table(found), indent=1))
    print(f"time: {elapsed():.0f} s")


if __name__ == "__main__":
    main()
