"""Products in every format by tokens: checked, timed beside bf16 and the limits; their tiles.

The shapes are those of an 8B Llama (`--shape`), with what the model does next to a product (norm,
gate, sum). Everything is timed as it is served: captured in a graph, over weights that exceed the
L2 cache together. The limit is the longer of reading the weight's own bytes and its operations in
bf16.

    products --search --kinds bf16 --into kernels/products/product_tiles.json
    products --search --kinds int4 fp8 --tokens 1 16 \
        --into kernels/products/quantised/quantised_tiles.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.lane_tiles import lane_tiles, matrix_tiles
from benchmarks.support.limits import BANDWIDTH, MATRIX_RATE
from benchmarks.support.models import FORMATS, shape_names, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    ROTATED_BYTES,
    compile_ahead,
    error_of,
    graph_seconds,
    neighbours,
    reporting,
    synchronise,
)
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.products import product_tiles as dense_tiles
from tokenpod.kernels.products import triton_product as dense_product
from tokenpod.kernels.products.product_tiles import LIBRARY
from tokenpod.kernels.products.quantised import format_products as quantised_product
from tokenpod.kernels.products.quantised import quantised_tiles

SMOKE = {
    "cpu": "--shape nano --kinds bf16 int8 --products output --tokens 1 5",
    "gpu": "--tokens 1 16 65 --products qkv --kinds bf16 int4 fp8 int8",
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 65, 96, 128, 256, 1024, 8192)
KINDS = ("bf16", "int4", "int8", "fp8")
#: Formats by the name that the table of tiles has for them.
TABLE_NAMES = {"nf4": "table4"}
#: Of a result in bfloat16; and where the matrix unit sums e4m3, more if a gate multiplies.
TOLERANCE, E4M3_TOLERANCE = 8e-3, 3e-2
#: The fastest tiles of a search are timed again.
TIMED_AGAIN = 2
CAPABILITY = torch.cuda.get_device_capability() if DEVICE.type == "cuda" else None

Product = Callable[[torch.Tensor], torch.Tensor]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shape_names(), default="llama-3.1-8b")
    parser.add_argument("--kinds", nargs="*", choices=FORMATS, default=list(KINDS))
    parser.add_argument("--products", nargs="*", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--search", action="store_true", help="neighbours of the table's tiles")
    parser.add_argument("--seconds", type=float, default=100, help="a search ends then")
    parser.add_argument("--into", type=Path, help="the table that gets the tiles found")


def run(asked: argparse.Namespace, report: Report) -> None:
    sizes = products_of(shape_of(asked.shape))
    cases = [Case(sizes[name], kind) for name in asked.products for kind in asked.kinds]
    found: list[dict[str, Any]] = []
    with torch.inference_mode():
        if asked.search:
            search(cases, asked, report, found)
        else:
            compile_ahead(served(cases, asked.tokens), compile_one)
            dense: dict[tuple[str, int], float] = {}
            for case in sorted(cases, key=lambda case: case.kind != "bf16"):
                with reporting(f"{case.shape.name} {case.kind}"):
                    time_case(case, asked.tokens, dense, report)
    if found:
        print("FOUND", json.dumps(found))
        if asked.into:
            write_table(asked.into, found)


@dataclass(frozen=True)
class ProductShape:
    """A weight [n, k] and what the model does next to its product."""

    name: str
    n: int
    k: int
    beside: str


PRODUCTS = ("qkv", "output", "gate_up", "down", "head")


def products_of(shape: dict[str, Any]) -> dict[str, ProductShape]:
    """Of a Llama's layer, and its head."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    sizes = {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden, "norm"),
        "output": (hidden, heads * dim, "add"),
        "gate_up": (2 * inner, hidden, "gate"),
        "down": (hidden, inner, "add"),
        "head": (shape["vocab_size"], hidden, "plain"),
    }
    return {name: ProductShape(name, *size) for name, size in sizes.items()}


@dataclass(frozen=True)
class Case:
    """A product in a format."""

    shape: ProductShape
    kind: str

    @property
    def table_name(self) -> str:
        """Of the format, in the table of tiles."""
        return TABLE_NAMES.get(self.kind, self.kind)

    def weights(self, count: int | None = None) -> list[Any]:
        """Random ones, enough to exceed the L2 cache together."""
        torch.manual_seed(2)
        drawn = torch.randn(self.shape.n, self.shape.k, device=DEVICE) * self.shape.k**-0.5
        first = FORMATS[self.kind](drawn)
        if count is None:
            count = max(ROTATED_BYTES // first.nbytes, 2) if DEVICE.type == "cuda" else 1
        return [first, *(FORMATS[self.kind](drawn.roll(i, 0)) for i in range(1, count))]

    def one_tile(self, tile: Any) -> Any:
        """A table with nothing but this tile."""
        if self.kind == "bf16":
            return dense_tiles.Tiles({}, [(1 << 30, tile)])
        return quantised_tiles.Tiles({self.table_name: [(1 << 30, tile)]}, {})

    def measured(self) -> Any:
        """The table that is served."""
        of = dense_tiles if self.kind == "bf16" else quantised_tiles
        return of.measured(CAPABILITY)


@cache
def inputs_of(tokens: int, k: int) -> torch.Tensor:
    """The same for every format."""
    torch.manual_seed(tokens)
    return torch.randn(tokens, k, device=DEVICE, dtype=DTYPE)


class Prepared:
    """Products with the same weights, whose tiles can be changed without packing those again."""

    def __init__(self, case: Case, weights: list[Any], tiles: Any = None) -> None:
        self.tiles = tiles or case.measured()
        self._case = case
        shape, dense = case.shape, case.kind == "bf16"
        module: Any = dense_product if dense else quantised_product
        self._residual = torch.zeros(0, device=DEVICE, dtype=DTYPE)
        norm = RowNorm(torch.ones(shape.k, device=DEVICE, dtype=DTYPE), 1e-5)
        if shape.beside in ("norm", "gate"):
            activation = Activation.SILU if shape.beside == "gate" else None
            prepare = lambda w: module.prepare_norm_linear(w, None, norm, activation, self)  # noqa: E731
        elif shape.beside == "plain":
            prepare = lambda w: module.prepare_linear(w, None, self)  # noqa: E731
        else:
            prepare = lambda w: partial(self._added, module.prepare_add_linear(w, None, self))  # noqa: E731
        self.products: list[Product] = [prepare(weight) for weight in weights]

    def _added(self, add: Any, x: torch.Tensor) -> torch.Tensor:
        if len(self._residual) < len(x):
            self._residual = torch.zeros((len(x), self._case.shape.n), device=DEVICE, dtype=DTYPE)
        add(x, self._residual[: len(x)])
        return self._residual[: len(x)]

    def choose(self, *which: Any, **more: Any) -> Any:
        """As a table of tiles."""
        return self.tiles.choose(*which, **more)

    def choose_own(self, *which: Any) -> Any:
        """As a table of tiles of bf16."""
        return self.tiles.choose_own(*which)

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """Of the first weight."""
        self._residual.zero_()
        return self.products[0](x).clone()

    def seconds(self, x: torch.Tensor, **how: Any) -> float:
        """Of one product; `how` as `graph_seconds` has it."""
        some = self.products if len(x) <= 256 else self.products[:2]
        return graph_seconds([partial(each, x) for each in some], **how)


def exact(case: Case, weight: Any, x: torch.Tensor) -> torch.Tensor:
    """What the product is, in float32."""
    wide, around = x.float(), case.shape.beside
    if around in ("norm", "gate"):
        wide = torch.nn.functional.rms_norm(wide, (wide.shape[1],), eps=1e-5)
    if isinstance(weight, torch.Tensor):
        y = wide @ weight.float().t()
    else:
        y = weight.rounded_inputs(wide) @ weight.dequantised(torch.float32).t()
    if around == "gate":
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    return y


def tolerance(case: Case) -> float:
    """For ‖got - truth‖ / ‖truth‖."""
    if not case.kind.startswith("fp8"):
        return TOLERANCE
    return E4M3_TOLERANCE * (1.5 if case.shape.beside == "gate" else 1)


def limit_of(case: Case, size: int, tokens: int) -> float:
    """Seconds: the longer of reading the weight and multiplying."""
    operations = 2 * case.shape.n * case.shape.k * tokens
    return max(size / BANDWIDTH, operations / MATRIX_RATE)


def time_case(
    case: Case, among: list[int], dense: dict[tuple[str, int], float], report: Report
) -> None:
    """Rows for each number of tokens; the times of bf16 go into `dense`."""
    weights = case.weights()
    prepared = Prepared(case, weights)
    for tokens in among:
        if case.shape.name == "head" and tokens > 256:
            continue  # nobody asks for so many logits
        x = inputs_of(tokens, case.shape.k)
        some = x[:300]
        off = error_of(prepared.result(some), exact(case, weights[0], some))
        if not off < tolerance(case):
            print(f"WRONG {case.shape.name} {case.kind} {tokens} tokens: error {off:.1e}")
        taken = prepared.seconds(x)
        if case.kind == "bf16":
            dense[case.shape.name, tokens] = taken
        base = dense.get((case.shape.name, tokens))
        report.row(
            "products",
            product=case.shape.name,
            format=case.kind,
            tokens=tokens,
            us=1e6 * taken,
            times_bf16=base / taken if base else None,
            limit_share=limit_of(case, weights[0].nbytes, tokens) / taken,
            **{"TFLOP/s": 2e-12 * case.shape.n * case.shape.k * tokens / taken},
            error=off,
        )


def candidates(case: Case, tokens: int) -> list[Any]:
    """The table's tile and its neighbours; of bf16 the library, of lanes all that fit."""
    table, size = case.measured(), (case.shape.n, case.shape.k)
    if case.kind == "bf16":
        return [LIBRARY, *neighbours(table.choose_own(*size, tokens))]
    tile = table.choose(case.table_name, *size, tokens)
    gated = case.shape.beside == "gate"
    if isinstance(tile, quantised_tiles.LaneTile):
        served, least = [] if tile is None else [tile], 64 if case.kind == "int8" else 128
        return list(dict.fromkeys([*served, *lane_tiles(*size, tokens, gated=gated, least=least)]))
    if case.kind == "fp8-blocks":
        served = [] if tile is None else [tile]
        return list(dict.fromkeys([*served, *matrix_tiles(*size, tokens, gated=gated)]))
    return neighbours(tile) if tile else []


@cache
def one_weight(case: Case) -> Prepared:
    """Of a process that compiles."""
    return Prepared(case, case.weights(1))


def compile_one(job: tuple[Case, int, Any]) -> str | None:
    """A kernel, into Triton's cache; what went wrong, if anything."""
    case, tokens, tile = job
    try:
        with torch.inference_mode():
            prepared = one_weight(case)
            prepared.tiles = case.one_tile(tile)
            prepared.result(inputs_of(tokens, case.shape.k))
            synchronise()
    except Exception as error:
        if "out of resource" not in str(error):
            return f"{case} {tokens} {tile}: {str(error)[:150]}"
    return None


def served(cases: list[Case], among: list[int]) -> list[tuple[Case, int, Any]]:
    """What is to be compiled of the tables that are served."""
    jobs = []
    for case in cases:
        size = case.shape.n, case.shape.k
        for tokens in among:
            which = size if case.kind == "bf16" else (case.table_name, *size)
            tile = case.measured().choose(*which, tokens)
            jobs += [(case, tokens, tile)] if tile else []
    return jobs


def kernels(cases: list[Case], among: list[int]) -> list[tuple[Case, int, Any]]:
    """What is to be compiled: products that are made by the same kernel have one of them."""
    jobs: dict[Any, tuple[Case, int, Any]] = {}
    for case in cases:
        for tokens in among:
            for tile in candidates(case, tokens):
                which: Any = case.shape.name
                if not isinstance(tile, quantised_tiles.TokenTile) and (case.kind != "bf16"):
                    apart = tile.splits > 1 or case.shape.beside == "norm"
                    which = "plain" if apart else case.shape.beside
                columns = min(tokens, getattr(tile, "block_t", tokens))
                jobs.setdefault((case.kind, which, columns, tile), (case, tokens, tile))
    return list(jobs.values())


def search(
    cases: list[Case], asked: argparse.Namespace, report: Report, found: list[dict[str, Any]]
) -> None:
    """The fastest tile of each case and number of tokens, beside the table's and bf16.

    Every tile is checked and timed in short; the fastest ones again, for longer.
    """
    until = time.monotonic() + asked.seconds
    among = [tokens for tokens in asked.tokens if tokens <= 8192]
    compile_ahead(kernels(cases, among), compile_one)
    best: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for case in cases:
        weights = case.weights()
        prepared, entries = Prepared(case, weights), []
        dense = Case(case.shape, "bf16")
        bf16 = Prepared(dense, dense.weights())
        for tokens in among:
            if time.monotonic() > until:
                report.note(f"the time is over at {case.shape.name} {case.kind}, {tokens} tokens")
                break
            x = inputs_of(tokens, case.shape.k)
            truth = exact(case, weights[0], x[:300])
            prepared.tiles = case.measured()
            base, now = bf16.seconds(x), prepared.seconds(x)
            ranked = []
            for tile in candidates(case, tokens):
                if time.monotonic() > until:
                    break
                prepared.tiles = case.one_tile(tile)
                try:
                    off = error_of(prepared.result(x)[:300], truth)
                    taken = prepared.seconds(x, rounds=2, least=0.001)
                except Exception as error:
                    if "out of resource" not in str(error):
                        print(f"FAILED {case} {tokens} {tile}: {str(error)[:150]}", flush=True)
                    continue
                if not off < tolerance(case):
                    print(f"WRONG {case} {tokens} {tile}: error {off:.1e}", flush=True)
                    continue
                ranked.append((taken, tile))
                which = {"product": case.shape.name, "format": case.kind, "tokens": tokens}
                tried = {**which, "us": 1e6 * taken, "bf16_us": 1e6 * base, "tile": str(tile)}
                report.tables.setdefault("tried", []).append(tried)
            ranked.sort(key=lambda pair: pair[0])
            again = []
            for _, tile in ranked[:TIMED_AGAIN]:
                prepared.tiles = case.one_tile(tile)
                again.append((prepared.seconds(x), tile))
            again.sort(key=lambda pair: pair[0])
            for taken, tile in again[:3]:
                report.row(
                    "tiles",
                    product=case.shape.name,
                    format=case.kind,
                    tokens=tokens,
                    us=1e6 * taken,
                    the_tables_us=1e6 * now,
                    times_bf16=base / taken,
                    limit_share=limit_of(case, weights[0].nbytes, tokens) / taken,
                    tile=tile,
                )
            if again:
                best.setdefault((case.kind, tokens), []).append((base, again[0][0]))
            entries += [entry_of(case, tokens, tile) for _, tile in again[:1]]
        size = {"n": case.shape.n, "k": case.shape.k}
        kind = {} if case.kind == "bf16" else {"kind": case.table_name}
        found.append({**kind, **size, "tiles": entries})
    for (kind, tokens), pairs in best.items():
        base, taken = (1e6 * sum(each) for each in zip(*pairs, strict=True))
        report.row(
            "together",
            format=kind,
            tokens=tokens,
            products=len(pairs),
            bf16_us=base,
            us=taken,
            times_bf16=base / taken,
        )


def entry_of(case: Case, tokens: int, tile: Any) -> dict[str, Any]:
    """A tile as its table writes it."""
    if case.kind == "bf16":
        fields = {} if tile == LIBRARY else asdict(tile)
        return {"rows": tokens, **fields, "kind": tile.kind.value}
    way = next(name for name, kind in quantised_tiles.WAYS.items() if isinstance(tile, kind))
    return {"tokens": tokens, "way": way, **asdict(tile)}


def merged(table: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    """The table with what was found; tiles of other numbers of tokens stay.

    A shape that is new to it begins with its format's: else the tile of the fewest tokens searched
    would serve all that are fewer.
    """
    for entry in found:
        key = {name: value for name, value in entry.items() if name != "tiles"}
        count = "tokens" if "kind" in key else "rows"
        had = [shape for shape in table["shapes"] if key.items() <= shape.items()]
        if "kind" in key and not had:
            had = [{"tiles": table["kinds"][key["kind"]]}]
        new = {tile[count] for tile in entry["tiles"]}
        kept = [tile for shape in had for tile in shape["tiles"] if tile[count] not in new]
        tiles = sorted([*entry["tiles"], *kept], key=lambda tile: tile[count])
        table["shapes"] = [shape for shape in table["shapes"] if shape not in had]
        table["shapes"].append({**key, "tiles": tiles})
    return table


def write_table(path: Path, found: list[dict[str, Any]]) -> None:
    """Those of the table's form."""
    table = json.loads(path.read_text())
    of_formats = "kinds" in table
    table = merged(table, [entry for entry in found if ("kind" in entry) == of_formats])
    text = quantised_tiles.text_of(table) if of_formats else json.dumps(table, indent=1) + "\n"
    path.write_text(text)
