"""Find tiles of products with weights of 8 and 4 bits on a GPU, and time steps with them.

    python -P benchmarks/gpu_product_tiles.py [--seconds 100] [--kinds int4 ...] [--tokens 1 ...]
        [--into TABLE]

Of each kind of weight, shape of an 8B Llama and 1, 16 and 64 tokens: microseconds and the share of
4.8 TB/s (of the weight's own bytes) of the table's tile and of the best of many, each of which is
checked against the reference first; then whole steps of the 8B shape in each format, head included,
beside bfloat16's, with the table as it is and with what was found. Prints the new table's entries;
`--into kernels/triton/quantised/tiles.json` writes them.

Kernels are compiled by several processes first. What is left when the time is over is not timed,
and that is said.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_decode_step
from gpu_fewer_bits import KINDS, ROTATED_BYTES, error_of, timed
from gpu_quantised import SHAPES, TOLERANCE, Exact, inputs_of, made
from product_tile_candidates import NAMES, SEARCHED, TOKENS, Case, candidates, tokens_of

from tokenpod.kernels.triton import OPERATIONS, quantised
from tokenpod.kernels.triton.quantised import laned, products
from tokenpod.kernels.triton.quantised.tiles import (
    WAYS,
    Tile,
    Tiles,
    measured,
    parse,
    text_of,
)
from tokenpod.kernels.weight import LinearWeight
from tokenpod.models.decoder import Decoder

#: Bytes a second that an H200's memory has by its data sheet.
MEMORY_RATE = 4.8e12
#: (rows, context) of steps.
STEPS = ((1, 256), (16, 1024), (64, 1024))
#: Rounds in which the steps of all tables are timed.
ROUNDS = 3


def weights_of(case: Case, count: int | None = None) -> list[Any]:
    n, k, _ = SHAPES[case.shape]
    torch.manual_seed(2)
    drawn = torch.randn(n, k, device="cuda") * k**-0.5
    make = KINDS[NAMES.get(case.kind, case.kind)]
    first = make(drawn)
    count = count or max(ROTATED_BYTES // first.nbytes, 2)
    return [first, *(make(drawn.roll(i, 0)) for i in range(1, count))]


def table_of(case: Case, tile: Tile) -> Tiles:
    return Tiles({case.kind: [(1 << 30, tile)]}, {})


class Prepared:
    """Products with the same weights, whose tiles can be changed without repacking those."""

    def __init__(self, case: Case, weights: list[Any]) -> None:
        self._tiles = Tiles({}, {})
        around = SHAPES[case.shape][2]
        self._residual: torch.Tensor | None = None
        if around != "add":
            self._products = [made(weight, around, self) for weight in weights]
            return
        added = [quantised.prepare_add_linear(weight, None, self) for weight in weights]  # type: ignore[arg-type]
        residual = torch.zeros(
            (max(*TOKENS, *tokens_of(case)), SHAPES[case.shape][0]),
            device="cuda",
            dtype=torch.bfloat16,
        )
        self._residual = residual

        def product(add: Any, x: torch.Tensor) -> torch.Tensor:
            add(x, residual[: len(x)])
            return residual[: len(x)]

        self._products = [partial(product, add) for add in added]

    def choose(self, *which: Any, but: type[Tile] | None) -> Tile | None:
        return self._tiles.choose(*which, but=but)

    def time(self, tiles: Tiles, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        self._tiles = tiles
        if self._residual is not None:
            self._residual.zero_()
        got = self._products[0](x).clone()
        return got, timed([lambda run=run: run(x) for run in self._products])  # type: ignore[misc]

    def run(self, tiles: Tiles, x: torch.Tensor) -> None:
        self._tiles = tiles
        self._products[0](x)


def compile_case(job: tuple[Case, int, int, int]) -> list[str]:
    """A part of a case's kernels, into Triton's cache; what went wrong."""
    case, tokens, part, parts = job
    wrong = []
    with torch.inference_mode():
        prepared = Prepared(case, weights_of(case, 1))
        x = inputs_of(tokens, SHAPES[case.shape][1])
        tables = [measured((9, 0)), *(table_of(case, tile) for tile in candidates(case, tokens))]
        for tiles in tables[part::parts]:
            try:
                prepared.run(tiles, x)
                torch.cuda.synchronize()
            except Exception as error:
                if "out of resource" not in str(error):
                    wrong.append(f"{case} {tokens} {tiles.by_kind}: {str(error)[:150]}")
    return wrong


def search(case: Case, among: list[int] | None, found: list[dict[str, Any]]) -> None:
    """Time a case's tiles; the best into `found`."""
    n, k, around = SHAPES[case.shape]
    weights, exact = weights_of(case), Exact()
    prepared = Prepared(case, weights)
    entries = []
    for tokens in tokens_of(case, among):
        x = inputs_of(tokens, k)
        expected = exact.of(weights[0], around, tokens)
        _, now = prepared.time(measured((9, 0)), x)
        ranked: list[tuple[float, Tile]] = []
        for tile in candidates(case, tokens):
            try:
                got, taken = prepared.time(table_of(case, tile), x)
            except Exception as error:
                if "out of resource" not in str(error):
                    print(f"FAILED {case} {tokens} {tile}: {str(error)[:150]}", flush=True)
                continue
            error = error_of(got, expected)
            # The matrix unit sums products of e4m3 in fewer bits; a gate multiplies two sums.
            if not error < TOLERANCE * (1.5 if case.kind == "fp8" and around == "gate" else 1):
                print(f"WRONG {case} {tokens} {tile}: error {error:.1e}", flush=True)
                continue
            ranked.append((taken, tile))
        if not ranked:
            continue
        ranked.sort(key=lambda pair: pair[0])
        best, tile = ranked[0]
        share = weights[0].nbytes / MEMORY_RATE
        print(
            f"{case.kind:8s} {case.shape:8s} {tokens:3d} table {now * 1e6:6.1f} us "
            f"{share / now:4.0%}  best {best * 1e6:6.1f} us {share / best:4.0%}",
            flush=True,
        )
        for taken, each in ranked[:3]:
            print(f"{'':10s}{taken * 1e6:6.1f} {each}", flush=True)
        way = next(name for name, kind in WAYS.items() if isinstance(tile, kind))
        entries.append({"tokens": tokens, "way": way, **asdict(tile)})
    found.append({"kind": case.kind, "n": n, "k": k, "tiles": entries})


def stays(tile: dict[str, Any], new: dict[int, str]) -> bool:
    """Beside new entries, by tokens: what is for others, or for weights that one cannot have."""
    way = new.get(tile["tokens"])
    return way is None or (way == "token" and tile["way"] == "lanes")


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of tiles.json with what was found."""
    path = Path(quantised.__file__).with_name("tiles.json")
    table = json.loads(path.read_text())
    for entry in found:
        key = {name: entry[name] for name in ("kind", "n", "k")}
        had = [s for s in table["shapes"] if key.items() <= s.items()]
        new = {tile["tokens"]: tile["way"] for tile in entry["tiles"]}
        kept = [tile for s in had for tile in s["tiles"] if stays(tile, new)]
        tiles = sorted([*entry["tiles"], *kept], key=lambda tile: tile["tokens"])
        table["shapes"] = [s for s in table["shapes"] if s not in had]
        table["shapes"].append({**key, "tiles": tiles})
    return table


@dataclass(frozen=True)
class Step:
    """What `gpu_decode_step.time_step` asks for a decoder."""

    made: Decoder
    pool: Any

    def decoder(self, choice: Any) -> Decoder:
        del choice
        return self.made


def time_steps(kinds: list[str], tables: dict[str, Tiles], steps: list[tuple[int, int]]) -> None:
    """Whole steps, head included, sampling left out."""
    stage = gpu_decode_step.make_stage()
    dense = stage.weights
    for kind in ["bf16", *kinds]:
        weights: dict[str, Any] = dict(dense)
        if kind != "bf16":
            make = KINDS[NAMES[kind]]
            for name, weight in dense.items():
                if weight.dim() == 2 and name != "embedding":
                    weights[name] = LinearWeight((make(weight.float()),))
        chosen = Prepared.__new__(Prepared)
        for module in (products, laned):
            module.measured = lambda capability: chosen  # noqa: B023
        decoder = Decoder(gpu_decode_step.config(), dict(weights), OPERATIONS)
        step = Step(decoder, stage.pool)
        own = tables if kind != "bf16" else dict(list(tables.items())[:1])
        for rows, context in steps:
            batch = gpu_decode_step.make_batch(rows, context)
            times: dict[str, list[float]] = {name: [] for name in own}
            for name, tiles in list(own.items()) * ROUNDS:
                chosen._tiles = tiles
                taken = gpu_decode_step.time_step(step, batch, {})  # type: ignore[arg-type]
                times[name].append(taken.seconds * 1e3)
                if not taken.steady:
                    print(f"NOT STEADY {kind} {name} {rows}", flush=True)
            for name, each in times.items():
                print(
                    f"step {rows:3d} x {context:5d} {kind:8s} {name:6s} "
                    f"{statistics.median(each):7.3f} ms of {', '.join(f'{t:.3f}' for t in each)}",
                    flush=True,
                )
        del decoder, step
        del weights
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="searching ends then")
    parser.add_argument("--kinds", nargs="*", default=list(SEARCHED), choices=NAMES)
    parser.add_argument("--tokens", nargs="*", type=int, help="of those that are searched")
    parser.add_argument("--steps", nargs="*", default=["int4", "fp8", "int8"], choices=NAMES)
    parser.add_argument("--rows", nargs="*", type=int, help="of the steps that are timed")
    parser.add_argument("--no-search", action="store_true", help="only the steps")
    parser.add_argument("--into", type=Path, help="the table that gets what was found")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    cases = [Case(kind, shape) for kind in options.kinds for shape in SEARCHED[kind]]
    cases = [] if options.no_search else cases
    jobs = [
        (case, tokens, part, 3)
        for case in cases
        for tokens in tokens_of(case, options.tokens)
        for part in range(3)
    ]
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    if jobs:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            for problems in pool.map(compile_case, jobs):
                for problem in problems:
                    print("FAILED", problem, flush=True)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        for done, case in enumerate(cases):
            if time.monotonic() - began > options.seconds:
                print(f"the time is over: {cases[done:]} are not timed")
                break
            try:
                search(case, options.tokens, found)
            except Exception as error:
                print(f"FAILED {case}: {type(error).__name__} {str(error)[:300]}", flush=True)
            torch.cuda.empty_cache()
        table = merged(found)
        print("TABLE", json.dumps(found), flush=True)
        if options.into:
            options.into.write_text(text_of(table))
        tables = {"table": measured((9, 0))}
        if found:
            tables["found"] = parse(table)
        if options.steps:
            steps = [step for step in STEPS if not options.rows or step[0] in options.rows]
            time_steps(options.steps, tables, steps)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
