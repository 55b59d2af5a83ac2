"""Find tiles for one token of weights of 8 and 4 bits inside whole steps, on a GPU.

    python -P benchmarks/gpu_step_tiles.py [--kinds int8 ...] [--seconds 110] [--check]
        [--into TABLE]

What is fastest behind itself (`gpu_product_tiles`) is not between its neighbours, since kernels
overlap. So one product's tile is changed at a time and the whole step is timed, 8B shape, head
included; what makes it faster is kept. Results are compared with those of the table as it is, and
with themselves. Then steps of the table, of what was found and of bfloat16 in turn, and the
entries; `--into kernels/triton/quantised/tiles.json`.

Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_decode_step
from gpu_fewer_bits import KINDS, error_of
from gpu_product_tiles import Prepared, Step, compile_case, merged, table_of, weights_of
from gpu_quantised import SHAPES, TOLERANCE, Exact, inputs_of
from product_tile_candidates import NAMES, OF_ONE_TOKEN, Case, candidates

from tokenpod.kernels.triton import OPERATIONS
from tokenpod.kernels.triton.quantised import laned, products
from tokenpod.kernels.triton.quantised.tiles import (
    Tile,
    Tiles,
    TokenTile,
    measured,
    parse,
    text_of,
)
from tokenpod.kernels.weight import LinearWeight
from tokenpod.models.decoder import Decoder

STEP = (1, 256)
#: The order of the search: what takes longest first.
ORDER = ("gate_up", "head", "down", "qkv", "output")
#: `TokenTile.chunks`: at first, and what is tried then; then of programs that walk.
CHUNKS, OTHER_CHUNKS, OTHER_BLOCKS = 8, (0,), (0,)
#: Rounds in which tables are timed in turn in the end.
ROUNDS = 5
#: Two results that differ by rounding only, after 32 layers; where inputs are rounded to 8 bits, a
#: neighbour more or less is much.
TOLERANCES = {"int8": 0.06, "int4": 0.06, "fp8": 0.5}
#: A change is kept if the step takes so much less.
LESS = 0.999

#: By shape's name.
Choice = dict[str, Tile]


class InStep:
    """A decoder of one kind of weight, whose tiles for one token can be changed."""

    def __init__(self, stage: gpu_decode_step.Stage, kind: str) -> None:
        self.kind = kind
        self._table = measured((9, 0))
        self._prepared = Prepared.__new__(Prepared)
        weights: dict[str, Any] = dict(stage.weights)
        if kind != "bf16":
            for name, weight in stage.weights.items():
                if weight.dim() == 2 and name != "embedding":
                    weights[name] = LinearWeight((KINDS[NAMES[kind]](weight.float()),))
        for module in (products, laned):
            module.measured = lambda capability: self._prepared
        self._step = Step(Decoder(gpu_decode_step.config(), weights, OPERATIONS), stage.pool)
        self._batch = gpu_decode_step.make_batch(*STEP)
        self._logits: torch.Tensor | None = None

    @property
    def table(self) -> Choice:
        return {
            name: self._table.choose(self.kind, n, k, 1)  # type: ignore[misc]
            for name, (n, k, _) in SHAPES.items()
        }

    def time(self, choice: Choice) -> float:
        """Milliseconds; infinite where the result is wrong."""
        by_shape = {
            (self.kind, SHAPES[name][0], SHAPES[name][1]): [(1, tile)]
            for name, tile in choice.items()
        }
        self._prepared._tiles = Tiles({}, by_shape)
        taken = gpu_decode_step.time_step(self._step, self._batch, {})  # type: ignore[arg-type]
        if self._logits is None:
            self._logits = taken.logits
        off = error_of(taken.logits, self._logits.float())
        if not taken.steady or not off < TOLERANCES.get(self.kind, 0.0) + 1e-6:
            print(
                f"WRONG {self.kind} {list(choice.values())}: off {off:.1e}, steady {taken.steady}",
                flush=True,
            )
            return float("inf")
        return taken.seconds * 1e3


def try_tiles(
    of: InStep, best: Choice, least: float, name: str, tiles: Iterable[Tile]
) -> tuple[Choice, float]:
    """The best choice with one product's tile changed, and its milliseconds."""
    seen: list[tuple[float, Tile]] = []
    for tile in tiles:
        try:
            seen.append((of.time({**best, name: tile}), tile))
        except Exception as error:
            if "out of resource" not in str(error):
                print(f"FAILED {name} {tile}: {str(error)[:150]}", flush=True)
    seen.sort(key=lambda pair: pair[0])
    for taken, tile in seen[:3]:
        print(f"  {taken:7.3f} {name:8s} {tile}", flush=True)
    if seen and seen[0][0] < least * LESS:
        return {**best, name: seen[0][1]}, seen[0][0]
    return best, least


def search(of: InStep, until: float) -> Choice:
    """The table's tiles, changed one by one for what makes the step faster."""
    best = of.table
    least = of.time(best)
    print(f"{of.kind}: the table {least:.3f} ms", flush=True)
    for asks in (False, True):
        for name in ORDER:
            if time.monotonic() > until:
                print(f"the time is over: not searched from {name} on", flush=True)
                return best
            tiles = others(best[name]) if asks else first(of.kind, name, best[name])
            best, least = try_tiles(of, best, least, name, tiles)
    return best


def first(kind: str, name: str, now: Tile) -> list[Tile]:
    """Shapes of tiles, asking as the one chosen does."""
    chunks = now.chunks if isinstance(now, TokenTile) and not now.programs else CHUNKS
    return [
        replace(tile, chunks=chunks) if isinstance(tile, TokenTile) and not tile.programs else tile
        for tile in candidates(Case(kind, name), 1)
    ]


def others(tile: Tile) -> list[Tile]:
    """The same tile, asking for more and for less."""
    if not isinstance(tile, TokenTile):
        return []
    return [
        replace(tile, chunks=chunks) for chunks in (OTHER_BLOCKS if tile.programs else OTHER_CHUNKS)
    ]


def compare(of: InStep, best: Choice) -> None:
    """Steps with the table and with what was found, in turn."""
    times: dict[str, list[float]] = {"table": [], "found": []}
    for _ in range(ROUNDS):
        for name, choice in (("table", of.table), ("found", best)):
            times[name].append(of.time(choice))
    for name, each in times.items():
        shown = ", ".join(f"{taken:.3f}" for taken in each)
        print(f"STEP {of.kind} {name} {statistics.median(each):.3f} ms of {shown}", flush=True)


def check(kind: str, best: Choice) -> None:
    """Each found product by itself, beside the table's."""
    for name, tile in best.items():
        exact = Exact()
        case = Case(kind, name)
        n, k, around = SHAPES[name]
        weights = weights_of(case)
        prepared, x = Prepared(case, weights), inputs_of(1, k)
        expected = exact.of(weights[0], around, 1)
        was = measured((9, 0)).choose(kind, n, k, 1)
        for which, each in (("table", was), ("found", tile)):
            got, taken = prepared.time(table_of(case, each), x)
            error = error_of(got, expected)
            right = "" if error < TOLERANCE * 1.5 else "  WRONG"
            print(f"{kind} {name:8s} {which} {taken * 1e6:6.1f} us error {error:.1e}{right}")


def entries_of(kind: str, best: Choice) -> list[dict[str, Any]]:
    """As `merged` takes them."""
    return [
        {
            "kind": kind,
            "n": SHAPES[name][0],
            "k": SHAPES[name][1],
            "tiles": [{"tokens": 1, "way": "token", **asdict(tile)}],
        }
        for name, tile in best.items()
        if isinstance(tile, TokenTile)
    ]


def compile_all(kinds: list[str]) -> None:
    jobs = [
        (Case(kind, shape), 1, part, 3) for kind in kinds for shape in SHAPES for part in range(3)
    ]
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for problems in pool.map(compile_case, jobs):
            for problem in problems:
                print("FAILED", problem, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="*", default=list(OF_ONE_TOKEN), choices=OF_ONE_TOKEN)
    parser.add_argument("--seconds", type=float, default=110, help="searching ends then")
    parser.add_argument("--no-search", action="store_true", help="only the table, beside bf16")
    parser.add_argument("--check", action="store_true", help="each found product by itself, too")
    parser.add_argument("--into", type=Path, help="the table that gets what was found")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if not options.no_search:
        compile_all(options.kinds)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        stage = gpu_decode_step.make_stage()
        dense = InStep(stage, "bf16")
        for i, kind in enumerate(options.kinds):
            of = InStep(stage, kind)
            share = (began + options.seconds - time.monotonic()) / (len(options.kinds) - i)
            best = of.table
            if not options.no_search:
                best = search(of, time.monotonic() + share)
            compare(of, best)
            found += entries_of(kind, best)
            print(f"STEP bf16 {dense.time({}):.3f} ms", flush=True)
            del of
            torch.cuda.empty_cache()
        print("FOUND", json.dumps(found), flush=True)
        if options.into:
            options.into.write_text(text_of(merged(found)))
        del stage, dense
        torch.cuda.empty_cache()
        for kind in options.kinds if options.check else ():
            best = {
                name: parse(merged(found)).choose(kind, n, k, 1)
                for name, (n, k, _) in SHAPES.items()
            }
            check(kind, best)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
