"""Check and time the attention kernels on a GPU.

    python benchmarks/gpu_attention.py small check time

`small` (a minute) times decode where a launch costs about as much as the reading, for tiles and
numbers of shares, with keys and values of 16 and of 8 bits.
`check` compares with the reference in float64 over a grid of shapes. `time` measures decode (TB/s)
and extend (TFLOP/s) for several tiles, beside torch's own kernels for prefill, and prints the best
tile of each case as JSON, for kernels/triton/attention_tiles.py. Decode runs as replayed graphs and
rotates over pools larger than the L2 cache together. Needs torch and Triton only: without an
installed Tokenpod it takes the folders beside this one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

try:
    import tokenpod
except ImportError:
    tokenpod = types.ModuleType("tokenpod")
    tokenpod.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["tokenpod"] = tokenpod

from tokenpod.kernels import reference
from tokenpod.kernels.attention_ops import NO_OPTIONS, AttentionOptions, KVScales
from tokenpod.kernels.batch import ForwardBatch, PagedRows
from tokenpod.kernels.reference.rotary import quantise
from tokenpod.kernels.triton.attention import attention, plan_attention
from tokenpod.kernels.triton.attention_decode import choose_splits, decode
from tokenpod.kernels.triton.attention_extend import extend
from tokenpod.kernels.triton.attention_plan import TileList, list_tiles, queries_per_tile
from tokenpod.kernels.triton.attention_tiles import (
    HOPPER,
    TILES,
    DecodeTile,
    ExtendTile,
    decode_tile_for,
)

#: Measured on an H200: a read-only pass over gigabytes, and a large bf16 product of random numbers.
READ_BYTES_PER_SECOND = 4.617e12
BF16_FLOPS = 687e12

#: The 8B Llama shape.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

#: Several times the L2 cache.
ROTATED_BYTES = 400 << 20

DECODE_VARIANTS = [
    DecodeTile(block, warps, stages, programs)
    for (block, warps, stages), programs in itertools.product(
        [(64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3), (32, 4, 6), (32, 2, 4)],
        [1, 2, 4, 8],
    )
]
#: Of `small`.
SMALL_VARIANTS = [
    replace(tile, ahead=ahead)
    for tile in (
        DecodeTile(32, 2, 4, 4),
        DecodeTile(32, 2, 3, 6),
        DecodeTile(32, 4, 4, 4),
        DecodeTile(64, 2, 3, 4),
        DecodeTile(64, 4, 3, 4),
        DecodeTile(64, 2, 4, 8),
        DecodeTile(128, 4, 3, 3),
    )
    for ahead in (0, 3)
]
SMALL_CASES = [
    *((1, context) for context in (256, 1024, 8192, 32_768)),
    *((16, context) for context in (1024, 4096, 8192)),
    (64, 1024),
    (200, 1024),
    (512, 300),
]
EXTEND_VARIANTS = [
    ExtendTile(128, 64, 8, 2),
    ExtendTile(128, 64, 8, 3),
    ExtendTile(128, 128, 8, 2),
    ExtendTile(128, 64, 4, 3),
    ExtendTile(128, 32, 4, 3),
    ExtendTile(64, 64, 4, 3),
    ExtendTile(64, 128, 4, 2),
]


def say(line: str) -> None:
    print(line, flush=True)


def batch_of(
    tokens: list[int],
    contexts: list[int],
    device: str = "cuda",
    *,
    piece: int | None = None,
    first_slot: int = 3,
) -> tuple[ForwardBatch, int]:
    """A step over rows of these sizes, and the first slot after theirs.

    Rows lie one after the other, or in pieces of `piece` slots, strewn and with gaps.
    """
    cuts = [
        (row, at, min(at + (piece or max(context, 1)), context))
        for row, context in enumerate(contexts)
        for at in range(0, context, piece or max(context, 1))
    ]
    order = torch.randperm(len(cuts)).tolist() if piece else range(len(cuts))
    firsts = {}
    for index in order:
        firsts[index] = first_slot
        first_slot += cuts[index][2] - cuts[index][1] + (1 if piece else 0)
    width = (max(contexts) + 64) // 64 * 64
    table = torch.full((len(contexts), width), -1, dtype=torch.int32)
    runs: list[list[tuple[int, int]]] = [[] for _ in contexts]
    for index, (row, at, end) in enumerate(cuts):
        runs[row].append((firsts[index], firsts[index] + end - at))
        table[row, at:end] = torch.arange(*runs[row][-1])
    starts = [0, *itertools.accumulate(tokens)]
    ids = list(range(len(contexts)))
    batch = ForwardBatch(
        t_token=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        t_position=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        t_slot=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        b_start=starts,
        b_context=contexts,
        b_runs=runs,
        b_row=ids,
        row_table=table.to(device),
        single_rows=sum(n == 1 for n in tokens),
        logit_index=torch.zeros(1, dtype=torch.int64, device=device),
        paged=PagedRows(
            *(torch.tensor(x, dtype=torch.int32, device=device) for x in (ids, starts, contexts))
        ),
    )
    return batch, first_slot


# --- check


@dataclass(frozen=True)
class Check:
    """One comparison with the reference."""

    heads: tuple[int, int] = (8, 2)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    rows: tuple[tuple[int, int], ...] = ((1, 1), (1, 77), (1, 0), (1, 1500), (9, 9), (300, 700))
    window: int | None = None
    piece: int | None = None
    options: str = ""
    #: Keys and values of 8 bits.
    scaled: bool = False

    def error(self) -> float:
        """‖difference‖ / ‖truth‖, the pool's other slots and all empty memory filled with NaN."""
        torch.manual_seed(1)
        heads, kv_heads = self.heads
        tokens, contexts = (list(column) for column in zip(*self.rows, strict=True))
        batch, slots = batch_of(tokens, contexts, piece=self.piece)
        pools = torch.full((2, slots + 200, kv_heads, self.head_dim), float("nan"), device="cuda")
        for start, end in itertools.chain.from_iterable(batch.b_runs):
            pools[:, start:end].normal_()
        keys, values = pools.to(self.dtype)
        scales = None
        if self.scaled:
            scales = KVScales(*(torch.rand(2, kv_heads, device="cuda") * 0.02 + 0.003))
            keys, values = quantise(keys, scales.keys), quantise(values, scales.values)
        q = torch.randn(batch.tokens, heads, self.head_dim, device="cuda").to(self.dtype)
        options = self.make_options(heads)
        poison = torch.full((64 << 20,), float("nan"), device="cuda")
        del poison  # what is allocated next takes this memory
        got = attention(q, keys, values, plan_attention(batch, self.window), options, scales)
        wide = (x.double() for x in (q, keys, values))
        plan = reference.plan_attention(batch, self.window)
        truth = reference.attention(*wide, plan, options, scales)
        return ((got.double() - truth).norm() / truth.norm()).item()

    def make_options(self, heads: int) -> AttentionOptions:
        options = NO_OPTIONS
        if "softcap" in self.options:
            options = replace(options, softcap=2.0)
        if "alibi" in self.options:
            options = replace(options, alibi_slopes=torch.rand(heads, device="cuda") * 0.1)
        if "sinks" in self.options:
            options = replace(options, sinks=torch.randn(heads, device="cuda"))
        return options

    @property
    def bound(self) -> float:
        return {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 7e-3}[self.dtype]


def checks() -> list[Check]:
    dims = [64, 80, 96, 128, 192, 256]
    types_ = [torch.bfloat16, torch.float16]
    cases = [Check(head_dim=d, dtype=t, piece=p) for d in dims for t in types_ for p in (None, 33)]
    cases += [Check(head_dim=d, dtype=torch.float32) for d in dims]
    groups = [(1, 1), (6, 2), (5, 1), (14, 2), (16, 1), (12, 12)]
    cases += [Check(heads=h, piece=p) for h in groups for p in (None, 5)]
    cases += [Check(window=w, piece=p) for w in (1, 64, 100, 1024, 5000) for p in (None, 33)]
    names = ["softcap", "alibi", "sinks", "softcap alibi sinks"]
    cases += [Check(options=o, window=w, head_dim=64) for o in names for w in (None, 200)]
    long = ((1, 32_768), (1, 32_767), (1, 5), (256, 32_768), (2, 20_001))
    cases += [Check(rows=long, piece=p, window=w) for p in (None, 64) for w in (None, 4096)]
    cases.append(Check(rows=((1, 700),) * 256, heads=(32, 8)))
    cases.append(Check(rows=tuple((1, 1 + 37 * i % 3000) for i in range(256)), piece=1))
    scaled = [replace(case, scaled=True) for case in cases]
    return cases + scaled


def try_check(case: Check) -> tuple[Check, float | str]:
    try:
        return case, case.error()
    except Exception:
        return case, traceback.format_exc(limit=-3)


def check(processes: int) -> None:
    began = time.monotonic()
    failed = 0
    cases = checks()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for case, error in pool.map(try_check, cases, chunksize=2):
            if isinstance(error, str) or not error < case.bound:
                failed += 1
                say(f"FAILED {case}: {error}")
    say(f"check: {len(cases) - failed} of {len(cases)} agree, {time.monotonic() - began:.0f} s")


# --- time


def milliseconds(run: Callable[[], object], launches: int, repeats: int = 5) -> float:
    """Median time of one of the launches that `run` makes, replayed as a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:]) / launches


class DecodeCase:
    """One batch and context, laid out in several places of the pool [2, slots, K, D]."""

    def __init__(self, rows: int, context: int, pools: torch.Tensor, piece: int | None) -> None:
        self.rows, self.pools = rows, pools
        self.bytes = 2 * rows * context * KV_HEADS * HEAD_DIM * pools.itemsize
        self.scales = None
        if pools.itemsize == 1:
            self.scales = KVScales(*torch.full((2, KV_HEADS), 0.02, device="cuda"))
        copies = min(max(2 * ROTATED_BYTES // self.bytes, 1), 160)
        self.batches: list[ForwardBatch] = []
        first = 3
        for _ in range(copies):
            batch, first = batch_of([1] * rows, [context] * rows, piece=piece, first_slot=first)
            if first >= pools.shape[1]:
                break
            self.batches.append(batch)
        self.q = torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def measure(self, tile: DecodeTile, splits: int) -> float:
        """Bytes per second."""
        out = torch.empty(self.rows, HEADS * HEAD_DIM, device="cuda", dtype=self.q.dtype)
        keys, values = self.pools

        def run() -> None:
            for batch in self.batches:
                assert batch.paged is not None
                decode(
                    self.q, keys, values, out, batch.row_table, batch.paged,
                    self.rows, None, tile, splits, scales=self.scales,
                )  # fmt: skip

        return self.bytes / milliseconds(run, len(self.batches)) * 1e3


def time_decode(best: dict[str, object]) -> None:
    say("\ndecode, 32 heads, 8 key/value heads of 128, bf16: GB/s, share of the read bandwidth")
    contexts, batches = [1024, 4096, 8192, 32_768], [1, 16, 64, 256]
    free = torch.cuda.mem_get_info()[0]
    slots = min(256 * 32_768, int(free * 0.7) // (KV_HEADS * HEAD_DIM * 4)) + 100
    pools = torch.empty((2, slots, KV_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    pools.normal_()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    cases = [(b, c, None) for b in batches for c in contexts] + [(16, 8192, 1), (64, 4096, 16)]
    for rows, context, piece in cases:
        if rows * context + 50 > slots:
            continue
        name = f"{rows:4d} x {context:6d}{f' in pieces of {piece}' if piece else ''}"
        try:
            case = DecodeCase(rows, context, pools, piece)
            rates: dict[tuple[DecodeTile, int], float] = {}
            for tile in DECODE_VARIANTS:
                splits = choose_splits(rows, KV_HEADS, processors, tile)
                key = replace(tile, programs=0), splits
                if key not in rates:
                    rates[key] = case.measure(tile, splits)
            (tile, splits), rate = max(rates.items(), key=lambda item: item[1])
            table = decode_tile_for(HEAD_DIM, pools.dtype, HOPPER, rows * KV_HEADS)
            ours = case.measure(table, choose_splits(rows, KV_HEADS, processors, table))
            best[name.strip()] = {**asdict(tile), "splits": splits}
            say(
                f"{name}: best {rate / 1e9:6.0f} {rate / READ_BYTES_PER_SECOND:6.1%} "
                f"(block {tile.block} warps {tile.warps} stages {tile.stages} splits {splits}); "
                f"the table's {ours / 1e9:6.0f} {ours / READ_BYTES_PER_SECOND:6.1%}; "
                f"{case.bytes / rate * 1e6:.1f} us"
            )
            if rows in (1, 16, 64) and context in (1024, 8192):
                for (tile, splits), rate in sorted(rates.items(), key=lambda item: -item[1])[:8]:
                    sizes = f"{tile.block}/{tile.warps}/{tile.stages}"
                    say(f"        {sizes:8s} splits {splits:3d} {rate / 1e9:6.0f}")
        except Exception:
            say(f"{name}: {traceback.format_exc(limit=-3)}")


def splits_to_try(rows: int, context: int, tile: DecodeTile) -> list[int]:
    """Those that start half a program a processor to twice what the tile asks for."""
    programs = [(n, rows * KV_HEADS * n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    blocks = context // tile.block
    return [n for n, p in programs if n == 1 or (60 <= p <= 264 * tile.programs and n <= blocks)]


def time_small() -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for dtype, slots in ((torch.bfloat16, 900_000), (torch.float8_e4m3fn, 1_700_000)):
        say(f"\ndecode, {dtype}: microseconds a launch (share of the read bandwidth)")
        pools = torch.empty((2, slots, KV_HEADS, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
        pools = pools.normal_().to(dtype)
        for rows, context in SMALL_CASES:
            try:
                time_variants(rows, context, DecodeCase(rows, context, pools, None), processors)
            except Exception:
                say(f"{rows} x {context}: {traceback.format_exc(limit=-3)}")
        del pools


def time_variants(rows: int, context: int, case: DecodeCase, processors: int) -> None:
    limit = case.bytes / READ_BYTES_PER_SECOND * 1e6
    table = decode_tile_for(HEAD_DIM, case.pools.dtype, HOPPER, rows * KV_HEADS)
    splits = choose_splits(rows, KV_HEADS, processors, table)
    ours = [case.bytes / case.measure(table, splits) * 1e6 for _ in range(2)]
    taken = {
        (tile, n): case.bytes / case.measure(tile, n) * 1e6
        for tile in SMALL_VARIANTS
        for n in splits_to_try(rows, context, tile)
    }
    ranked = sorted(taken.items(), key=lambda item: item[1])
    say(
        f"{rows:3d} x {context:6d}: limit {limit:6.1f}; the table's {ours[0]:6.1f} and "
        f"{ours[1]:6.1f} ({limit / min(ours):4.0%}), splits {splits}"
    )
    for (tile, n), microseconds in ranked[:5]:
        say(
            f"      {microseconds:6.1f} ({limit / microseconds:4.0%})  "
            f"{tile.block}/{tile.warps}/{tile.stages} splits {n:2d} ahead {tile.ahead}"
        )


class ExtendCase:
    """One row: `queries` tokens at the end of `context`."""

    def __init__(self, queries: int, context: int) -> None:
        self.batch, slots = batch_of([queries], [context])
        shape = (2, slots + 300, KV_HEADS, HEAD_DIM)
        self.keys, self.values = torch.randn(shape, device="cuda").bfloat16()
        self.q = torch.randn(queries, HEADS, HEAD_DIM, device="cuda").bfloat16()
        pairs = queries * (context - queries) + queries * (queries + 1) // 2
        self.flops = 4 * HEADS * HEAD_DIM * pairs
        self.whole = queries == context

    def measure(self, tile: ExtendTile, gathered: bool) -> float:
        """Operations per second."""
        tiles = list_tiles(self.batch, None, queries_per_tile(HEADS, KV_HEADS, tile))
        if gathered:
            scattered = tiles.contiguous.clone()
            scattered[:, 3] = 0
            tiles = TileList(tiles.contiguous[:0], scattered)
        out = torch.empty(len(self.q), HEADS * HEAD_DIM, device="cuda", dtype=self.q.dtype)

        def run() -> None:
            for _ in range(2):
                extend(self.q, self.keys, self.values, out, self.batch.row_table, tiles, None, tile)

        return self.flops / milliseconds(run, 2) * 1e3

    def measure_torch(self, backend: SDPBackend) -> float:
        start, end = self.batch.b_runs[0][0]
        q, k, v = (
            x.transpose(0, 1)[None].contiguous()
            for x in (self.q, self.keys[start:end], self.values[start:end])
        )
        with sdpa_kernel(backend):
            return (
                self.flops
                / milliseconds(
                    lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                    1,
                )
                * 1e3
            )


def time_extend(best: dict[str, object]) -> None:
    say("\nextend, 32 heads, 8 key/value heads of 128, bf16: TFLOP/s, share of the matrix rate")
    shapes = [(2048, 2048), (8192, 8192), (32_768, 32_768), (512, 32_768), (512, 1024), (16, 8192)]
    for queries, context in shapes:
        name = f"{queries} of {context}"
        case = ExtendCase(queries, context)
        rates: dict[tuple[ExtendTile, str], float] = {}
        for tile, gathered in itertools.product(EXTEND_VARIANTS, (False, True)):
            how = "gathered" if gathered else "described"
            try:
                rates[tile, how] = case.measure(tile, gathered)
            except Exception as error:
                say(f"{name} {tile} {how}: {type(error).__name__} {str(error)[:200]}")
        ranked = sorted(rates.items(), key=lambda item: -item[1])
        for (tile, how), rate in ranked[: 1 if context == 1024 else 14]:
            sizes = f"{tile.block_m}x{tile.block_n}, {tile.warps} warps, {tile.stages} stages"
            share = rate / BF16_FLOPS
            say(f"{name:16s} {rate / 1e12:6.0f} {share:6.1%}  {sizes}, {how}")
        if ranked:
            best[name] = asdict(ranked[0][0][0])
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                if case.whole:
                    rate = case.measure_torch(backend)
                    share = rate / BF16_FLOPS
                    say(f"{name:16s} {rate / 1e12:6.0f} {share:6.1%}  torch {backend.name}")
            except Exception as error:
                say(f"{name} torch {backend.name}: {type(error).__name__} {str(error)[:120]}")


def compile_variant(variant: DecodeTile | ExtendTile) -> None:
    """Fill Triton's cache on disk: the same specialisations as the measurements'."""
    try:
        if isinstance(variant, ExtendTile):
            case = ExtendCase(256, 256)
            case.measure(variant, True)
            case.measure(variant, False)
        else:
            pools = torch.zeros((2, 400, KV_HEADS, HEAD_DIM), device="cuda")
            for dtype, splits in itertools.product((torch.bfloat16, torch.float8_e4m3fn), (1, 2)):
                DecodeCase(1, 256, pools.to(dtype), None).measure(variant, splits)
    except Exception as error:
        say(f"{variant}: {type(error).__name__} {str(error)[:300]}")


def measure(processes: int) -> None:
    began = time.monotonic()
    table = TILES[HEAD_DIM, 2]
    tiles = {replace(tile, programs=1) for tile in DECODE_VARIANTS}
    tiles |= {replace(tile, programs=1) for _, tile in table.decode}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, [*EXTEND_VARIANTS, *tiles, table.extend]))
    say(f"compiled in {time.monotonic() - began:.0f} s")
    best: dict[str, object] = {}
    for part in (time_extend, time_decode):
        try:
            part(best)
        except Exception:
            say(traceback.format_exc(limit=-3))
    say(f"\n{json.dumps(best)}\ntime: {time.monotonic() - began:.0f} s")


def measure_small(processes: int) -> None:
    began = time.monotonic()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_variant, SMALL_VARIANTS))
    say(f"compiled in {time.monotonic() - began:.0f} s")
    time_small()
    say(f"small: {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=["small", "check", "time"])
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    arguments = parser.parse_args()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in arguments.parts:
        {"small": measure_small, "check": check, "time": measure}[part](arguments.processes)


if __name__ == "__main__":
    main()
