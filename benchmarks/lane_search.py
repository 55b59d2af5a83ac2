"""Search for the form of the product of int4 weights (temporary)."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
from collections import defaultdict
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
    graph_seconds,
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
from tokenpod.kernels.products.quantised.lanes import lanes_of
from tokenpod.kernels.products.quantised.parts import sum_parts

BF16 = torch.bfloat16


@triton.jit
def _scaled(packed, large, small, less, large2, small2, less2):
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
        fma.rn.bf16x2 $2, $2, $8, $10;
        fma.rn.bf16x2 $3, $3, $9, $10;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r",
        [packed, large, small, less, large2, small2, less2],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _whole(packed):
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 high, large, less_large, less;
        mov.b32 large, 0x7F007F00;
        mov.b32 less_large, 0x7D007D00;
        mov.b32 less, 0xBE00BE00;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000F000F;
        and.b32 $1, $4, 0x00F000F0;
        and.b32 $2, high, 0x000F000F;
        and.b32 $3, high, 0x00F000F0;
        fma.rn.bf16x2 $0, $0, large, less;
        fma.rn.bf16x2 $1, $1, less_large, less;
        fma.rn.bf16x2 $2, $2, large, less;
        fma.rn.bf16x2 $3, $3, less_large, less;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _over(v, w):
    return tl.broadcast_to(v.to(tl.bfloat16)[:, None], w.shape)


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
    MODE: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GATES: tl.constexpr = 2 if ACTIVATION != "none" else 1
    ALL: tl.constexpr = GATES * PARTS * BLOCK_N
    SUB: tl.constexpr = WIDTH // LANES
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
    first = (tl.program_id(1) * PARTS + part) * share
    rows = GATES * n
    lane = tl.arange(0, LANES)
    if PARTS == 1:
        begin = tl.program_id(1) * share
        at_x = x + token.to(tl.int64) * x_stride
    else:
        begin = 0
        at_x = x + token.to(tl.int64) * x_stride + first * LANES * 4
    if AHEAD > 0:
        start = tl.program_id(1) * PARTS * share * LANES
        ask_rows(weight, block_n * BLOCK_N, n, start, row_lanes, BLOCK_N, AHEAD)
        if GATES == 2:
            ask_rows(weight, block_n * BLOCK_N + n, rows, start, row_lanes, BLOCK_N, AHEAD)
    await_inputs(OVERLAP)
    sums = tl.zeros((ALL, COLUMNS), tl.float32)
    for step in tl.range(0, share, num_stages=STAGES):
        its = begin + step
        i = its // SUB * (4 * WIDTH) + its % SUB * LANES
        at = at_x[None, :] + (i + lane)[:, None]
        v0 = tl.load(at, mask=is_x[None, :], other=0.0)
        v1 = tl.load(at + WIDTH, mask=is_x[None, :], other=0.0)
        v2 = tl.load(at + 2 * WIDTH, mask=is_x[None, :], other=0.0)
        v3 = tl.load(at + 3 * WIDTH, mask=is_x[None, :], other=0.0)
        at_lane = at_w[:, None] + (step * LANES + lane)[None, :]
        packed = tl.load(at_lane, eviction_policy="evict_first")
        word = tl.load(scale + ((first_step + step) // SUB) * rows + own)
        s0 = (word << 16).to(tl.float32, bitcast=True)
        s2 = (word & -65536).to(tl.float32, bitcast=True)
        if MODE == "numbers":
            a, b, c = s0 * 2.0**121, s0 * 2.0**117, s0 * (-8 * 2.0**-12)
            d, e, f = s2 * 2.0**121, s2 * 2.0**117, s2 * (-8 * 2.0**-12)
            w0, w1, w2, w3 = _scaled(
                packed,
                _over(a, packed),
                _over(b, packed),
                _over(c, packed),
                _over(d, packed),
                _over(e, packed),
                _over(f, packed),
            )
            sums = tl.dot(w0, v0, sums)
            sums = tl.dot(w1, v1, sums)
            sums = tl.dot(w2, v2, sums)
            sums = tl.dot(w3, v3, sums)
        else:
            if ASSEMBLY:
                w0, w1, w2, w3 = _whole(packed)
            else:
                w0 = (((packed & 15) - 8).to(tl.float32) / 64).to(x.dtype.element_ty)
                w1 = ((((packed >> 4) & 15) - 8).to(tl.float32) / 64).to(x.dtype.element_ty)
                w2 = ((((packed >> 8) & 15) - 8).to(tl.float32) / 64).to(x.dtype.element_ty)
                w3 = ((((packed >> 12) & 15) - 8).to(tl.float32) / 64).to(x.dtype.element_ty)
            dot = tl.dot(w0, v0)
            dot = tl.dot(w1, v1, dot)
            sums += dot * s0[:, None]
            dot = tl.dot(w2, v2)
            dot = tl.dot(w3, v3, dot)
            sums += dot * s2[:, None]
    sums *= 4096.0 if MODE == "numbers" else 64.0
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
    mode: str
    rows: int  # of a tile: gates, parts and all
    columns: int  # tokens of a tile
    lanes: int
    warps: int
    stages: int
    splits: int = 1
    parts: int = 1
    ahead: int = 0

    @property
    def shared(self) -> int:
        """Bytes, about."""
        columns = max(self.columns * self.parts, 8)
        v, w = columns * self.lanes * 8, self.rows * (self.lanes * 2 + 4)
        return v * self.stages + w * max(self.stages - 1, 1)

    @property
    def registers(self) -> int:
        """Of a thread, about."""
        sums = self.rows * max(self.columns * self.parts, 8) // (32 * self.warps)
        return sums * (2 if self.mode == "sums" else 1) + self.rows * self.lanes * 2 // (
            32 * self.warps
        )


SHAPES = {
    "qkv": (6144, 4096, "norm"),
    "output": (4096, 4096, "add"),
    "gate_up": (28672, 4096, "gate"),
    "down": (4096, 14336, "add"),
}


class Words:
    def __init__(self, made):
        self.numbers = made.numbers
        bits = made.scale.view(torch.int16).to(torch.int32) & 0xFFFF
        self.scale = (bits[0::2] | bits[1::2] << 16).contiguous()
        self.rows, self.inputs, self.width = made.rows, made.inputs, made.width


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
        MODE=tile.mode,
        WIDTH=weight.width,
        LANES=tile.lanes,
        ACTIVATION="silu" if beside == "gate" else "none",
        ADD=beside == "add" and splits == 1,
        SPLITS=splits,
        PARTS=tile.parts,
        COLUMNS=max(tile.parts * block_t, 8),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        AHEAD=tile.ahead,
        ASSEMBLY=y.is_cuda,
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
    modes = ("numbers", "sums")
    if tokens == 1:
        for mode in modes:
            for rows, parts in ((64, 4), (64, 8), (128, 8), (128, 16), (64, 16), (64, 2)):
                for warps, stages, lanes in ((4, 2, 64), (4, 3, 64), (4, 4, 32), (8, 2, 64)):
                    found.append(Tile(mode, rows, 1, lanes, warps, stages, 1, parts))
                if parts == 8:
                    found.append(Tile(mode, rows, 1, 64, 4, 2, 1, parts, 4096))
                    found.append(Tile(mode, rows, 1, 64, 4, 2, 2, parts))
    elif tokens <= 16:
        for mode in modes:
            for rows, parts in ((64, 1), (128, 1), (64, 2), (64, 4), (128, 4), (128, 2)):
                for warps, stages, lanes in ((4, 3, 64), (4, 4, 32), (4, 2, 64), (8, 3, 64)):
                    for splits in (1, 2, 4, 8):
                        found.append(Tile(mode, rows, 16, lanes, warps, stages, splits, parts))
    elif tokens <= 64:
        for mode in modes:
            for rows in (64, 128, 256):
                for warps in (4, 8):
                    for lanes, stages in ((64, 2), (64, 3), (32, 3), (32, 4), (32, 5)):
                        for splits in (1, 2, 3, 4, 8):
                            found.append(Tile(mode, rows, tokens, lanes, warps, stages, splits))
    else:
        for mode in modes:
            for rows, columns in ((128, 64), (256, 64), (128, 128), (256, 128), (128, 256)):
                for warps in (4, 8, 16):
                    for lanes, stages in ((64, 2), (64, 3), (32, 2), (32, 3), (32, 4)):
                        for splits in (1, 2, 3, 4, 8):
                            found.append(Tile(mode, rows, columns, lanes, warps, stages, splits))
    return [tile for tile in found if fits(tile, tokens, n, k, beside)]


def fits(tile, tokens, n, k, beside):
    gates = 2 if beside == "gate" else 1
    steps = k // 4 // tile.lanes
    if tile.rows < 64 * tile.warps // 4 or (tile.splits > 1 and gates == 2):
        return False
    share = steps // (tile.parts * tile.splits)
    if share * tile.parts * tile.splits != steps or share % (64 // tile.lanes):
        return False
    if tile.shared > 225_000 or tile.registers > 215:
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
    # Both modes and every small variant everywhere would take too long.
    if tokens > 64 and tile.mode == "sums" and (tile.stages == 2 or tile.splits == 3):
        return False
    return not (tokens == 64 and tile.splits in (3, 8) and tile.mode == "sums")


def compile_one(job):
    tile, tokens, beside = job
    n, k = 1024, 12288
    try:
        with torch.inference_mode():
            gates = 2 if beside == "gate" else 1
            weight = Words.__new__(Words)
            weight.numbers = torch.zeros((n * gates, k // 4), dtype=torch.int16, device=DEVICE)
            weight.scale = torch.zeros((k // 256, n * gates), dtype=torch.int32, device=DEVICE)
            weight.rows, weight.inputs, weight.width = n * gates, k, 64
            x = torch.zeros((tokens, k), dtype=BF16, device=DEVICE)
            multiply(x, weight, torch.zeros((tokens, n), dtype=BF16, device=DEVICE), beside, tile)
            synchronise()
    except Exception as error:
        return f"{tile} {str(error)[:120]}"
    return None


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
                jobs.append((tile, tokens if tokens < 64 else 64 if tokens == 64 else tile.columns, kind))
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
            made = lanes_of(first)
            exact_weight = first.dequantised(torch.float32)
            count = max((200 << 20) // made.nbytes, 2)
            many = [made, *(lanes_of(Int4Weight.made_of(dense.roll(i, 0))) for i in range(1, count))]
            words = [Words(each) for each in many]
            wide = [dense.to(BF16)] * 1
            wide += [dense.roll(i, 0).to(BF16) for i in range(1, max((200 << 20) // (2 * n * k), 2))]
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
                    at[label] = graph_seconds(products(module, weights, x, y, beside), least=0.01)
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
                        taken = graph_seconds(each, rounds=3, least=0.002)
                    except Exception as error:
                        print("FAILED", name, tokens, tile, str(error)[:100], flush=True)
                        continue
                    ranked.append((1e6 * taken, off, tile))
                ranked.sort(key=lambda each: each[0])
                base = row["bf16"]
                print(
                    f"\n{name} {tokens}: bf16 {base:.1f} us, today {row['today']:.1f} "
                    f"({base / row['today']:.2f}); {len(ranked)} tiles",
                    flush=True,
                )
                of_mode = defaultdict(int)
                for taken, off, tile in ranked:
                    of_mode[tile.mode] += 1
                    if of_mode[tile.mode] <= 4:
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
            print(f"layer, {tokens} rows: bf16 {dense:.1f}, today {now:.1f} ({dense / now:.2f}), best {best:.1f} ({dense / best:.2f})")
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
