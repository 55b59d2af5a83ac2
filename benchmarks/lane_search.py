"""Search for the form of the product of int4 weights (temporary)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if "benchmarks" not in sys.modules:
    package = types.ModuleType("benchmarks")
    package.__path__ = [str(Path(__file__).resolve().parent)]
    sys.modules["benchmarks"] = package
if __name__ == "__main__" and "TOKENPOD_UNINSTALLED" not in os.environ:
    from importlib.util import find_spec

    if find_spec("tokenpod") is None:
        script = str(Path(__file__).resolve().parent / "uninstalled.sh")
        os.execvp("bash", ["bash", script, sys.executable, "-P", *sys.argv])

import torch
import triton
import triton.language as tl

from benchmarks.support.timing import (
    DEVICE,
    compile_ahead,
    error_of,
    events_seconds,
    synchronise,
)
from tokenpod.kernels.products.formats.int4 import Int4Weight
from tokenpod.kernels.operations.pointwise_ops import Activation
from tokenpod.kernels.products import triton_product as dense_product
from tokenpod.kernels.products.quantised import format_products as quantised_product
from tokenpod.kernels.gpu.launch import await_inputs, launch_options
from tokenpod.kernels.pointwise.triton_pointwise import gated_unit, rms_norm
from tokenpod.kernels.products.triton_product import add_up
from tokenpod.kernels.products.product_kernels import ask_rows
from tokenpod.kernels.products.quantised import lanes as lanes_module
from tokenpod.kernels.products.quantised.lanes import lanes_of
from tokenpod.kernels.products.quantised.parts import sum_parts

BF16 = torch.bfloat16
_ASSEMBLY = os.environ.get("TRITON_INTERPRET") != "1"


@triton.jit
def _scaled(packed, large, small, less):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, $5, $7;
        fma.rn.bf16x2 $1, $1, $6, $7;
        fma.rn.bf16x2 $2, $2, $5, $7;
        fma.rn.bf16x2 $3, $3, $6, $7;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [packed, large, small, less],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _over(v, w):
    return tl.broadcast_to(v.to(tl.bfloat16)[:, :, None], w.shape)


@triton.jit
def _plane(packed, shift, s, DTYPE: tl.constexpr):
    return ((((packed >> shift) & 15) - 8).to(tl.float32) * s[:, :, None]).to(DTYPE)


@triton.jit(do_not_specialize=["tokens"])
def lanes_kernel(
    x,
    weight,
    scale,
    y,
    x_stride,
    y_stride,
    tokens,
    n,
    k,
    row_lanes,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    AHEAD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * PARTS * BLOCK_N
    LANES: tl.constexpr = 32 * BLOCKS
    INPUTS: tl.constexpr = 4 * LANES
    steps = row_lanes // LANES
    share = steps // (PARTS * SPLITS)
    blocks_t = tl.cdiv(tokens, BLOCK_T)
    block_n = tl.program_id(0) // blocks_t
    block_t = tl.program_id(0) % blocks_t
    tile_row = tl.arange(0, ALL)
    row_part = tile_row // BLOCK_N % PARTS
    own = tl.minimum(block_n * BLOCK_N + tile_row % BLOCK_N, n - 1)
    own += tile_row // (PARTS * BLOCK_N) * n
    first_step = (tl.program_id(1) * PARTS + row_part) * share
    at_w = weight + own.to(tl.int64) * row_lanes + first_step * LANES
    column = tl.arange(0, COLUMNS)
    part, token = column // BLOCK_T, block_t * BLOCK_T + column % BLOCK_T
    is_x = (token < tokens) & (part < PARTS)
    rows = GATES * n
    lane = tl.arange(0, LANES)
    block = tl.arange(0, BLOCKS)
    at_s = scale + first_step * (BLOCKS * rows) + own
    at_x = x + token.to(tl.int64) * x_stride
    at_x += (tl.program_id(1) * PARTS + part) * share * INPUTS
    if AHEAD > 0:
        start = tl.program_id(1) * PARTS * share * LANES
        ask_rows(weight, block_n * BLOCK_N, n, start, row_lanes, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, block_n * BLOCK_N + n, rows, start, row_lanes, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    sums = tl.zeros((ALL, COLUMNS), tl.float32)
    for step in tl.range(0, share, num_stages=STAGES):
        i = step * INPUTS + tl.arange(0, INPUTS)
        v = tl.load(at_x[None, :] + i[:, None], mask=is_x[None, :], other=0.0)
        packed = tl.load(
            at_w[:, None] + (step * LANES + lane)[None, :], eviction_policy="evict_first"
        )
        s = tl.load(at_s[:, None] + ((step * BLOCKS + block) * rows)[None, :])
        s = s.to(tl.float32, bitcast=True)
        packed = tl.reshape(packed, (ALL, BLOCKS, 32))
        if ASSEMBLY:
            w0, w1, w2, w3 = _scaled(
                packed,
                _over(s * 2.0**121, packed),
                _over(s * 2.0**117, packed),
                _over(s * (-8 * 2.0**-12), packed),
            )
        else:
            w0 = _plane(packed, 0, s, x.dtype.element_ty)
            w1 = _plane(packed, 4, s, x.dtype.element_ty)
            w2 = _plane(packed, 8, s, x.dtype.element_ty)
            w3 = _plane(packed, 12, s, x.dtype.element_ty)
        w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        w = tl.reshape(tl.permute(w, (0, 1, 3, 4, 2)), (ALL, INPUTS))
        sums = tl.dot(w, v, sums)
    if ASSEMBLY:
        sums *= 4096.0
    row = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = block_t * BLOCK_T + tl.arange(0, BLOCK_T)
    out = sum_parts(sums, row_part, part, GATES, PARTS, BLOCK_N, BLOCK_T)
    inside = (token < tokens)[None, :] & (row < n)[:, None]
    if SPLITS > 1:
        at_part = (tl.program_id(1).to(tl.int64) * tokens + token[None, :]) * n + row[:, None]
        tl.store(y + at_part, tl.reshape(out, (BLOCK_N, BLOCK_T)), mask=inside)
    else:
        if GATES == 2:
            out, up = tl.split(tl.permute(out, (1, 2, 0)))
            out = gated_unit(out, up, ACTIVATION)
        else:
            out = tl.reshape(out, (BLOCK_N, BLOCK_T))
        at_y = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
        out = out.to(y.dtype.element_ty)
        if ADD:
            out = out.to(tl.float32) + tl.load(at_y, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_y, out.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tile:
    rows: int  # of a tile: gates, parts and all
    columns: int  # tokens of a tile
    blocks: int  # of 128 inputs, of a step
    warps: int
    stages: int
    splits: int = 1
    parts: int = 1
    ahead: int = 0

    @property
    def shared(self) -> int:
        """Bytes, about."""
        columns = max(self.columns * self.parts, 8)
        v, w = columns * self.blocks * 256, self.rows * self.blocks * 68
        return v * self.stages + w * max(self.stages - 1, 1)

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        sums = self.rows * max(self.columns * self.parts, 8)
        return (sums + self.rows * self.blocks * 64) // (32 * self.warps)


SHAPES = {
    "gate_up": (28672, 4096, "gate"),
    "down": (4096, 14336, "add"),
    "qkv": (6144, 4096, "norm"),
    "output": (4096, 4096, "add"),
}


class Words:
    def __init__(self, made):
        self.numbers = made.numbers
        self.scale = made.scale.float().view(torch.int32).contiguous()
        self.rows, self.inputs = made.rows, made.inputs


def multiply(x, weight, y, beside, tile):
    tokens, n = y.shape
    gates = 2 if beside == "gate" else 1
    block_t = min(tile.columns, triton.next_power_of_2(tokens))
    block_n = tile.rows // (gates * tile.parts)
    splits, target = tile.splits, y
    if splits > 1:
        target = torch.empty((splits, tokens, n), dtype=torch.float32, device=y.device)
    lanes_kernel[(triton.cdiv(n, block_n) * triton.cdiv(tokens, block_t), splits)](
        *(x, weight.numbers, weight.scale, target, x.stride(0), target.stride(-2)),
        *(tokens, n, weight.inputs, weight.numbers.shape[1]),
        ACTIVATION="silu" if beside == "gate" else "none",
        ADD=beside == "add" and splits == 1,
        SPLITS=splits,
        PARTS=tile.parts,
        COLUMNS=max(tile.parts * block_t, 8),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCKS=tile.blocks,
        AHEAD=tile.ahead,
        ASSEMBLY=_ASSEMBLY,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **launch_options(y.device),
    )
    if splits > 1:
        add_up(target, None, y, add=beside == "add")


def around(x, weight, y, beside, tile):
    if beside in ("gate", "norm"):
        x = rms_norm(x, _NORM[x.shape[1]], 1e-5)
    multiply(x, weight, y, beside, tile)


_NORM = {k: torch.ones(k, device=DEVICE, dtype=BF16) for k in (4096, 14336)}


def tiles_of(tokens: int, name: str) -> list[Tile]:
    n, k, beside = SHAPES[name]
    found = []
    if tokens == 1:
        for rows, parts in ((64, 4), (64, 8), (128, 8), (128, 16), (64, 16), (64, 2)):
            for warps, stages, blocks in (
                (4, 2, 1), (4, 3, 1), (4, 4, 1), (4, 6, 1), (4, 2, 2), (4, 3, 2), (4, 2, 4), (8, 3, 2),
            ):  # fmt: skip
                for splits in (1, 2):
                    found.append(Tile(rows, 1, blocks, warps, stages, splits, parts))
            found.append(Tile(rows, 1, 2, 4, 2, 1, parts, 2048))
            found.append(Tile(rows, 1, 1, 4, 4, 1, parts, 2048))
    elif tokens <= 16:
        for rows, parts in ((64, 1), (128, 1), (64, 2), (64, 4), (128, 4), (128, 2)):
            for warps, stages, blocks in (
                (4, 3, 1), (4, 4, 1), (4, 6, 1), (4, 2, 2), (4, 3, 2), (4, 4, 2), (8, 3, 2), (8, 4, 1),
            ):  # fmt: skip
                for splits in (1, 2, 4, 8):
                    found.append(Tile(rows, 16, blocks, warps, stages, splits, parts))
    elif tokens <= 64:
        for rows in (64, 128, 256):
            for warps in (4, 8):
                for blocks, stages in ((1, 3), (1, 4), (1, 6), (2, 2), (2, 3), (2, 4)):
                    for splits in (1, 2, 3, 4, 8):
                        found.append(Tile(rows, 64, blocks, warps, stages, splits))
    else:
        for rows, columns in ((128, 64), (256, 64), (128, 128), (256, 128), (128, 256)):
            for warps in (4, 8, 16):
                for blocks, stages in ((1, 2), (1, 3), (1, 4), (2, 2), (2, 3)):
                    for splits in (1, 2, 3, 4, 8):
                        found.append(Tile(rows, columns, blocks, warps, stages, splits))
    return [tile for tile in found if fits(tile, tokens, n, k, beside)]


def fits(tile, tokens, n, k, beside):
    gates = 2 if beside == "gate" else 1
    steps = k // 128 // tile.blocks
    if tile.rows < 64 * tile.warps // 4 or (tile.splits > 1 and gates == 2):
        return False
    if steps % (tile.parts * tile.splits) or tile.shared > 225_000 or tile.registers > 220:
        return False
    if tile.columns > triton.next_power_of_2(tokens):
        return False
    programs = -(-n * gates * tile.parts // tile.rows) * -(-tokens // tile.columns) * tile.splits
    if tile.splits > 1 and (programs > 132 * 5 or tokens * tile.splits > 2048):
        return False
    if tokens >= 64 and programs < 60:
        return False
    if tokens > 64 and tile.splits > 1 and programs > 132 * 2.1:
        return False
    return not (tokens > 256 and tile.columns < 128)


def compile_one(job):
    tile, tokens, beside = job
    n, k = 1024, 14336 * 6
    try:
        with torch.inference_mode():
            gates = 2 if beside == "gate" else 1
            weight = Words.__new__(Words)
            weight.numbers = torch.zeros((n * gates, k // 4), dtype=torch.int16, device=DEVICE)
            weight.scale = torch.zeros((k // 128, n * gates), dtype=torch.int32, device=DEVICE)
            weight.rows, weight.inputs = n * gates, k
            x = torch.zeros((tokens, k), dtype=BF16, device=DEVICE)
            multiply(x, weight, torch.zeros((tokens, n), dtype=BF16, device=DEVICE), beside, tile)
            synchronise()
    except Exception as error:
        return f"{tile} {str(error)[:120]}"
    return None


_STREAM = torch.cuda.Stream() if DEVICE.type == "cuda" else None


def seconds(runs, rounds, least):
    """As `graph_seconds`, without the collection of garbage at each capture."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_STREAM):
        graph.capture_begin(capture_error_mode="thread_local")
        for run in runs:
            run()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    calls = max(1, min(200, int(least / max(events_seconds(graph.replay), 1e-7))))
    found = [events_seconds(graph.replay, calls) for _ in range(rounds)]
    return statistics.median(found) / len(runs)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 64, 128, 256, 512, 1024])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--seconds", type=float, default=285)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    jobs = []
    for tokens in asked.tokens:
        for name in asked.shapes:
            beside = SHAPES[name][2]
            for tile in tiles_of(tokens, name):
                kind = beside if tile.splits == 1 and beside != "norm" else "plain"
                jobs.append((tile, min(tokens, tile.columns), kind))
    jobs = list(dict.fromkeys(jobs))
    measured = sum(len(tiles_of(t, s)) for t in asked.tokens for s in asked.shapes)
    print(len(jobs), "kernels,", measured, "measurements", flush=True)
    if asked.count:
        return
    broken = {job[0] for job in compile_ahead(jobs, compile_one, most=15)}
    rows = []
    with torch.inference_mode():
        for name in asked.shapes:
            n, k, beside = SHAPES[name]
            torch.manual_seed(1)
            dense = torch.randn(n, k, device=DEVICE) * k**-0.5
            first = Int4Weight.made_of(dense)
            exact_weight = first.dequantised(torch.float32)
            lanes_module.MOST_WIDTH = 64
            made = lanes_of(first)
            count = max((200 << 20) // made.nbytes, 2)
            rolled = [dense.roll(i, 0) for i in range(1, count)] if count < 30 else []
            many = [made, *(lanes_of(Int4Weight.made_of(each)) for each in rolled)]
            lanes_module.MOST_WIDTH = 32
            words = [Words(lanes_of(first)), *(Words(lanes_of(Int4Weight.made_of(e))) for e in rolled)]
            wide = [dense.to(BF16)]
            wide += [dense.roll(i, 0).to(BF16) for i in range(1, max((200 << 20) // (2 * n * k), 2))]
            del rolled
            outputs = n // 2 if beside == "gate" else n
            for tokens in asked.tokens:
                x = torch.randn(tokens, k, device=DEVICE).to(BF16)
                y = torch.zeros(tokens, outputs, device=DEVICE, dtype=BF16)
                exact = x.float() @ exact_weight.t()
                if beside == "gate":
                    gate, up = exact.chunk(2, 1)
                    exact = torch.nn.functional.silu(gate) * up
                at = {}
                for label, module, weights in (
                    ("bf16", dense_product, wide),
                    ("today", quantised_product, many),
                ):
                    at[label] = seconds(products(module, weights, x, y, beside), 5, 0.01)
                row = dict(shape=name, tokens=tokens, bf16=1e6 * at["bf16"], today=1e6 * at["today"])
                ranked = []
                for tile in tiles_of(tokens, name):
                    if tile in broken:
                        continue
                    if time.monotonic() - began > asked.seconds:
                        print("the time is over", flush=True)
                        break
                    try:
                        y.zero_()
                        multiply(x, words[0], y, beside, tile)
                        off = error_of(y, exact)
                        if not off < 1e-2:
                            print("WRONG", name, tokens, tile, off, flush=True)
                            continue
                        each = [partial(around, x, w, y, beside, tile) for w in words]
                        taken = seconds(each, 2, 0.001)
                        ranked.append((1e6 * taken, off, tile))
                    except Exception as error:
                        print("FAILED", name, tokens, tile, str(error)[:100], flush=True)
                ranked.sort(key=lambda each: each[0])
                for place, (_, off, tile) in enumerate(ranked[:6]):
                    each = [partial(around, x, w, y, beside, tile) for w in words]
                    ranked[place] = (1e6 * seconds(each, 5, 0.01), off, tile)
                ranked[:6] = sorted(ranked[:6], key=lambda each: each[0])
                base = row["bf16"]
                print(
                    f"\n{name} {tokens}: bf16 {base:.1f} us, today {row['today']:.1f} "
                    f"({base / row['today']:.2f}); {len(ranked)} tiles",
                    flush=True,
                )
                for taken, off, tile in ranked[:6]:
                    print(f"  {taken:7.1f} ({base / taken:.2f}) {off:.1e} {tile}", flush=True)
                row["tiles"] = [(t, o, vars_of(tile)) for t, o, tile in ranked]
                rows.append(row)
    if asked.json:
        asked.json.write_text(json.dumps(rows))
    for tokens in asked.tokens:
        some = [row for row in rows if row["tokens"] == tokens and row["tiles"]]
        if len(some) == len(asked.shapes):
            dense = sum(row["bf16"] for row in some)
            best = sum(row["tiles"][0][0] for row in some)
            now = sum(row["today"] for row in some)
            print(
                f"layer, {tokens} rows: bf16 {dense:.1f}, today {now:.1f} ({dense / now:.2f}), "
                f"best {best:.1f} ({dense / best:.2f})"
            )
    print(f"{time.monotonic() - began:.0f} s")


def vars_of(tile):
    return {name: getattr(tile, name) for name in tile.__dataclass_fields__}


def products(module, weights, x, y, beside):
    if beside in ("gate", "norm"):
        from tokenpod.kernels.operations.pointwise_ops import RowNorm

        activation = Activation.SILU if beside == "gate" else None
        norm = RowNorm(torch.ones(x.shape[1], device=DEVICE, dtype=BF16), 1e-5)
        return [
            partial(module.prepare_norm_linear(w, None, norm, activation), x) for w in weights
        ]
    if beside == "add":
        return [partial(module.prepare_add_linear(w, None), x, y) for w in weights]
    return [partial(module.prepare_linear(w, None), x) for w in weights]


if __name__ == "__main__":
    sys.exit(main())
