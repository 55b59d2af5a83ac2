"""The attention kernels: decode (TB/s) and prompts (TFLOP/s), by tile.

Of an 8B Llama (32 heads, 8 key/value heads of 128) unless `--shape` says otherwise, with keys and
values of 16 and of 8 bits.
Decode runs as replayed graphs over pools that exceed the L2 cache together. Every case is compared
with the reference first, where that is small enough. `--search` tries the neighbours of the table's
tiles, for kernels/attention/attention_tiles.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.support.limits import BANDWIDTH, MATRIX_RATE
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    ROTATED_BYTES,
    error_of,
    graph_seconds,
    neighbours,
    reporting,
)
from tokenpod.kernels.attention.attention_decode import choose_splits, decode
from tokenpod.kernels.attention.attention_extend import extend
from tokenpod.kernels.attention.attention_plan import list_tiles, queries_per_tile
from tokenpod.kernels.attention.attention_tiles import (
    HOPPER,
    TILES,
    DecodeTile,
    ExtendTile,
    decode_tile_for,
)
from tokenpod.kernels.backends import reference
from tokenpod.kernels.operations.attention_ops import NO_OPTIONS, KVScales
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows

GPU = DEVICE.type == "cuda"
SMOKE = {
    "cpu": "--decode 1x40 --prompts 16/24",
    "gpu": "--decode 1x256 16x1024 --prompts 512/512",
}
#: What a search tries besides: tiles of long heads in which several programs share the values.
IN_PARTS = [
    ExtendTile(128, 32, 8, 2, parts=2),
    ExtendTile(128, 32, 8, 1, parts=2),
    ExtendTile(128, 64, 8, 1, parts=2),
    ExtendTile(128, 16, 8, 3, parts=2),
    ExtendTile(64, 64, 8, 1),
    ExtendTile(64, 32, 4, 3, parts=2),
]
#: Where scores of queries with keys are so many at most, results are compared.
CHECKED = 40_000_000
#: Of ‖got - truth‖ / ‖truth‖.
TOLERANCE = {2: 7e-3, 1: 2e-2}


class Shape(NamedTuple):
    """Of heads: of queries, of keys and values, and numbers of one."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


def options(parser: argparse.ArgumentParser) -> None:
    decode = ["1x1024", "1x8192", "1x32768", "16x1024", "16x8192", "64x1024", "200x1024", "512x300"]
    parser.add_argument("--decode", nargs="*", default=decode, metavar="ROWSxCONTEXT")
    prompts = ["2048/2048", "8192/8192", "32768/32768", "512/32768", "16/8192"]
    parser.add_argument("--prompts", nargs="*", default=prompts, metavar="QUERIES/CONTEXT")
    parser.add_argument("--shape", nargs=3, type=int, default=Shape(), metavar=("H", "K", "D"))
    parser.add_argument("--search", action="store_true", help="other tiles, too")


def run(asked: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(1)
    shape = Shape(*asked.shape)
    with torch.inference_mode():
        for dtype in (DTYPE, torch.float8_e4m3fn):
            sizes = [tuple(map(int, spec.split("x"))) for spec in asked.decode]
            most = max((rows * context for rows, context in sizes), default=0)
            slots = (
                max(2 * most, ROTATED_BYTES // (shape.kv_heads * shape.head_dim * 2))
                if GPU
                else most
            )
            pools = torch.empty(
                (2, slots + 1000, shape.kv_heads, shape.head_dim), device=DEVICE, dtype=DTYPE
            )
            pools = pools.normal_().to(dtype)
            for rows, context in sizes:
                with reporting(f"decode {rows} x {context} {dtype}"):
                    time_decode(DecodeCase(shape, rows, context, pools), asked, report)
            del pools
        for spec in asked.prompts:
            queries, context = map(int, spec.split("/"))
            with reporting(f"{queries} queries of {context}"):
                time_extend(ExtendCase(shape, queries, context), asked, report)


def batch_of(tokens: list[int], contexts: list[int], first: int = 3) -> tuple[ForwardBatch, int]:
    """A step over rows that lie one after the other, and the first slot after theirs."""
    width = (max(contexts) + 64) // 64 * 64
    table = torch.full((len(contexts), width), -1, dtype=torch.int32)
    runs: list[list[tuple[int, int]]] = []
    for row, context in enumerate(contexts):
        runs.append([(first, first + context)])
        table[row, :context] = torch.arange(first, first + context)
        first += context
    starts, ids = [0, *itertools.accumulate(tokens)], list(range(len(contexts)))
    zeros = torch.zeros(starts[-1], dtype=torch.int64, device=DEVICE)
    paged = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (ids, starts, contexts))
    batch = ForwardBatch(
        t_token=zeros,
        t_place=zeros,
        t_slot=zeros,
        b_start=starts,
        b_context=contexts,
        b_runs=runs,
        b_row=ids,
        row_table=table.to(DEVICE),
        single_rows=sum(n == 1 for n in tokens),
        logit_index=zeros[:1],
        paged=PagedRows(*paged),
    )
    return batch, first


class DecodeCase:
    """One batch and context, laid out in several places of the pools [2, slots, K, D]."""

    def __init__(self, shape: Shape, rows: int, context: int, pools: torch.Tensor) -> None:
        self.shape = shape
        self.rows, self.context, self.pools = rows, context, pools
        self.bytes = 2 * rows * context * shape.kv_heads * shape.head_dim * pools.itemsize
        self.scales = None
        if pools.itemsize == 1:
            self.scales = KVScales(*torch.full((2, shape.kv_heads), 0.02, device=DEVICE))
        copies = min(max(2 * ROTATED_BYTES // self.bytes, 1), 160) if GPU else 1
        self.batches: list[ForwardBatch] = []
        first = 3
        for _ in range(copies):
            batch, first = batch_of([1] * rows, [context] * rows, first)
            if first >= pools.shape[1] and self.batches:
                break
            self.batches.append(batch)
        self.q = torch.randn(rows, shape.heads, shape.head_dim, device=DEVICE, dtype=DTYPE)
        self.out = torch.empty(rows, shape.heads * shape.head_dim, device=DEVICE, dtype=DTYPE)

    def launch(self, batch: ForwardBatch, tile: DecodeTile, splits: int) -> None:
        assert batch.paged is not None
        keys, values = self.pools
        decode(
            self.q, keys, values, self.out, batch.row_table, batch.paged,
            self.rows, None, tile, splits, scales=self.scales,
        )  # fmt: skip

    def seconds(self, tile: DecodeTile, splits: int) -> float:
        """Of one launch."""
        runs = [lambda b=batch: self.launch(b, tile, splits) for batch in self.batches]  # type: ignore[misc]
        return graph_seconds(runs)

    def error(self, tile: DecodeTile, splits: int) -> float | None:
        """Against the reference; None where that is large."""
        if self.rows * self.context * self.shape.heads > CHECKED:
            return None
        batch = self.batches[0]
        self.launch(batch, tile, splits)
        plan = reference.plan_attention(batch, None)
        keys, values = (pool.float() for pool in self.pools)
        truth = reference.attention(self.q.float(), keys, values, plan, NO_OPTIONS, self.scales)
        return error_of(self.out.view(len(truth), -1), truth.view(len(truth), -1))


def time_decode(case: DecodeCase, asked: argparse.Namespace, report: Report) -> None:
    """The table's tile; with --search the best ones of others."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count if GPU else 1
    table = decode_tile_for(
        case.shape.head_dim, case.pools.dtype, HOPPER, case.rows * case.shape.kv_heads
    )
    tried = [(table, choose_splits(case.rows, case.shape.kv_heads, processors, table))]
    if asked.search:
        tried = [
            (tile, choose_splits(case.rows, case.shape.kv_heads, processors, tile))
            for tile in neighbours(table)
        ]
    taken: dict[tuple[DecodeTile, int], float] = {}
    for tile, splits in tried:
        with reporting(f"{tile}, {splits} splits"):
            off = case.error(tile, splits)
            if off is not None and not off < TOLERANCE[case.pools.itemsize]:
                print(f"WRONG decode {case.rows} x {case.context} {tile}: error {off:.1e}")
            taken[tile, splits] = case.seconds(tile, splits)
    for tile, splits in [tried[0], *sorted(taken, key=taken.__getitem__)[: 4 * asked.search]]:
        seconds = taken[tile, splits]
        report.row(
            "decode",
            rows=case.rows,
            context=case.context,
            bits=8 * case.pools.itemsize,
            us=1e6 * seconds,
            **{"GB/s": case.bytes / seconds / 1e9, "limit_share": case.bytes / seconds / BANDWIDTH},
            splits=splits,
            tile="the table's" if tile == table and splits == tried[0][1] else tile,
        )


class ExtendCase:
    """One row: `queries` tokens at the end of `context`."""

    def __init__(self, shape: Shape, queries: int, context: int) -> None:
        self.shape = shape
        self.queries, self.context = queries, context
        self.batch, slots = batch_of([queries], [context])
        sizes = (2, slots + 300, shape.kv_heads, shape.head_dim)
        self.keys, self.values = torch.randn(sizes, device=DEVICE).to(DTYPE)
        self.q = torch.randn(queries, shape.heads, shape.head_dim, device=DEVICE).to(DTYPE)
        self.out = torch.empty(queries, shape.heads * shape.head_dim, device=DEVICE, dtype=DTYPE)
        pairs = queries * (context - queries) + queries * (queries + 1) // 2
        self.operations = 4 * shape.heads * shape.head_dim * pairs

    def launcher(self, tile: ExtendTile) -> Callable[[], object]:
        """A launch whose list of tiles is made beforehand."""
        tiles = list_tiles(
            self.batch, None, queries_per_tile(self.shape.heads, self.shape.kv_heads, tile)
        )
        table = self.batch.row_table
        return lambda: extend(self.q, self.keys, self.values, self.out, table, tiles, None, tile)

    def error(self) -> float | None:
        """Of what was computed last, against the reference; None where that is large."""
        if self.queries * self.context * self.shape.heads > CHECKED:
            return None
        wide = (x.float() for x in (self.q, self.keys, self.values))
        plan = reference.plan_attention(self.batch, None)
        truth = reference.attention(*wide, plan, NO_OPTIONS, None)
        return error_of(self.out.view(len(truth), -1), truth.view(len(truth), -1))


def time_extend(case: ExtendCase, asked: argparse.Namespace, report: Report) -> None:
    """The table's tile; others with --search."""
    table = TILES[case.shape.head_dim, 2].extend
    found: list[tuple[float, str]] = []
    tried = [tile for tile in neighbours(table) if tile.parts] if asked.search else [table]
    if asked.search and case.shape.head_dim > 256:
        tried += IN_PARTS
    for tile in dict.fromkeys(tried):
        with reporting(str(tile)):
            found.append((graph_seconds(case.launcher(tile)), str(tile)))
            off = case.error()
            if off is not None and not off < TOLERANCE[2]:
                print(f"WRONG {case.queries} queries of {case.context}, {tile}: {off:.1e}")
    for seconds, name in found[:1] + sorted(found[1:])[:4]:
        rate = case.operations / seconds
        cells = {"TFLOP/s": rate / 1e12, "limit_share": rate / MATRIX_RATE, "tile": name}
        sizes = {"queries": case.queries, "context": case.context}
        report.row("prompts", **sizes, us=1e6 * seconds, **cells)
