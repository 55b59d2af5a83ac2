"""One-off: candidates of products with weights of 4 and 8 bits, each checked, beside today's.

python -P benchmarks/gpu_planes.py [--seconds 115] [--parts PART...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_fewer_bits import KINDS, timed
from gpu_quantised import READ_RATE, SHAPES, made
from planes_kernels import planes, rows8

from tokenpod.kernels.triton.launch import launch_options
from tokenpod.kernels.triton.pointwise import rms_norm
from tokenpod.kernels.triton.product_kernels import add_partials

ROTATED = 200 << 20
HBM = 4.8e12
DEVICE = "cuda"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.linspace(-1, 1, 16) ** 3
PLANES = {"int4": 4, "mxfp4": 4, "nf4": 4, "groups8": 2, "int8": 2}
GROUP = {"int4": 128, "mxfp4": 32, "nf4": 64, "groups8": 128, "int8": None}


@dataclass(frozen=True)
class V:
    """A candidate."""

    kind: str
    shape: str
    tokens: int
    bn: int
    warps: int
    stages: int
    width: int = 64
    mode: str = "sums"
    splits: int = 1
    ahead: int = 0
    unroll: int = 1
    #: Norm in a launch of its own.
    apart: bool = False
    #: Programs a multiprocessor (rows8).
    each: int = 0

    def __str__(self) -> str:
        more = f" split {self.splits}" * (self.splits > 1) + f" ahead {self.ahead}" * (
            self.ahead > 0
        )
        more += " apart" * self.apart + f" each {self.each}" * (self.each > 0)
        more += f" unroll {self.unroll}" * (self.unroll > 1)
        return f"{self.mode} {self.bn}x{self.width} w{self.warps} s{self.stages}{more}"


class Packed:
    """Random words, and what they stand for."""

    def __init__(self, kind: str, n: int, k: int, width: int, words: bool) -> None:
        self.kind, self.n, self.k, self.width = kind, n, k, width
        p = PLANES[kind]
        self.words = torch.randint(-32768, 32768, (n, k // p), dtype=torch.int16, device=DEVICE)
        group = GROUP[kind]
        count = 1 if group is None else k // group
        real = (torch.rand(count, n, device=DEVICE) + 0.5) * k**-0.5 / 8
        if kind == "mxfp4":
            self.scale = torch.randint(118, 122, (count, n), dtype=torch.uint8, device=DEVICE)
        elif kind == "int4":
            self.scale = real.to(torch.bfloat16)
        else:
            self.scale = real / (16 if p == 2 else 1)
        self.launched = self.scale
        if words:
            pair = self.scale.view(torch.int16).to(torch.int32) & 0xFFFF
            pair = pair.view(count // 2, 2, n)
            self.launched = (pair[:, 0] | pair[:, 1] << 16).contiguous()
        bits = NF4.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
        low = (bits & 255).to(torch.uint8)
        high = (bits >> 8).to(torch.uint8)
        self.table = torch.cat((low, high)).view(torch.int32).to(DEVICE)

    def dequantised(self) -> torch.Tensor:
        p, w = PLANES[self.kind], self.width
        words = self.words.view(self.n, -1, w).to(torch.int32) & 0xFFFF
        if p == 2:
            values = torch.stack((words & 255, words >> 8), 2).to(torch.uint8)
            values = values.view(torch.int8).float()
        elif self.kind == "nf4":
            both = self.words.view(torch.int32).view(self.n, -1, w // 2)
            codes = torch.empty((self.n, both.shape[1], 4, w), dtype=torch.int64, device=DEVICE)
            for plane in range(4):
                for half in range(2):
                    codes[:, :, plane, half::2] = both >> 4 * (2 * plane + half) & 15
            values = NF4.to(torch.bfloat16).float().to(DEVICE)[codes]
        else:
            codes = torch.stack([words >> 4 * plane & 15 for plane in range(4)], 2).long()
            values = codes.float() - 8
            if self.kind == "mxfp4":
                values = torch.cat((E2M1, -E2M1)).to(DEVICE)[codes]
        values = values.reshape(self.n, self.k)
        scale = self.scale
        scale = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        return values * scale.repeat_interleave(self.k // len(scale), 0).t()

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.launched.nbytes


def around_of(shape: str) -> tuple[int, int, str]:
    return SHAPES[shape]


def launch_planes(v: V, w: Packed, x: torch.Tensor, y: torch.Tensor, nw: torch.Tensor) -> None:
    rows, k, around = around_of(v.shape)
    gated = around == "gate"
    normed = around in ("norm", "gate")
    n = rows // 2 if gated else rows
    tokens = len(x)
    if normed and (v.apart or tokens > 1):
        x = rms_norm(x, nw, 1e-5)
        normed = False
    p = PLANES[v.kind]
    group = GROUP[v.kind]
    target = y
    if v.splits > 1:
        target = torch.empty((v.splits, tokens, n), dtype=torch.float32, device=x.device)
    block_t = 8 if tokens <= 8 else triton.next_power_of_2(tokens)
    block_t = max(block_t, 16) if v.bn >= 64 and v.warps % 4 == 0 else block_t
    planes[(triton.cdiv(n, v.bn), v.splits)](
        *(x, w.words, w.launched, w.table, nw if normed else None, target),
        *(x.stride(0), target.stride(-2), tokens, n, k, 1e-5, w.words.shape[1]),
        KIND="table4" if v.kind == "nf4" else "int8" if p == 2 else v.kind,
        MODE="row" if group is None else v.mode,
        PLANES=p,
        PER=p if group is None else group // v.width,
        ACTIVATION="silu" if gated else "none",
        ADD=around == "add" and v.splits == 1,
        SPLITS=v.splits,
        BLOCK_T=block_t,
        BLOCK_N=v.bn,
        WIDTH=v.width,
        MOST_K=triton.next_power_of_2(k),
        STAGES=v.stages,
        UNROLL=v.unroll,
        AHEAD=v.ahead,
        num_warps=v.warps,
        **launch_options(x.device),
    )
    if v.splits > 1:
        add_partials[(tokens, triton.cdiv(n, 512))](
            *(target, y, y, y.stride(0), tokens, n),
            BIAS=False,
            ADD=around == "add",
            SPLITS=v.splits,
            BLOCK=512,
            num_warps=2,
            **launch_options(x.device),
        )


class Bytes:
    """A plain weight of 8 bits."""

    def __init__(self, kind: str, n: int, k: int) -> None:
        self.fp8 = kind == "fp8"
        self.values = torch.randn(n, k, device=DEVICE) * (60.0 if self.fp8 else 40.0)
        self.numbers = (
            self.values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
            if self.fp8
            else self.values.clamp(-127, 127).to(torch.int8)
        )
        del self.values
        self.scale = (torch.rand(n, device=DEVICE) + 0.5) * k**-0.5 / 50
        self.nbytes = self.numbers.nbytes

    def dequantised(self) -> torch.Tensor:
        numbers = self.numbers.view(torch.float8_e4m3fn) if self.fp8 else self.numbers
        return numbers.float() * self.scale[:, None]


def launch_rows8(v: V, w: Bytes, x: torch.Tensor, y: torch.Tensor, nw: torch.Tensor) -> None:
    rows, k, around = around_of(v.shape)
    gated = around == "gate"
    n = rows // 2 if gated else rows
    programs = min(triton.cdiv(n, v.bn), 132 * v.each)
    rows8[(programs,)](
        *(x, w.numbers, w.scale, nw if around in ("norm", "gate") else None, y, n, k, 1e-5),
        FP8=w.fp8,
        ROUND=w.fp8,
        ACTIVATION="silu" if gated else "none",
        ADD=around == "add",
        EVEN=k & (k - 1) == 0,
        BLOCK_N=v.bn,
        BLOCK_K=triton.next_power_of_2(k),
        STAGES=v.stages,
        AHEAD=v.ahead,
        num_warps=v.warps,
        **launch_options(x.device),
    )


def is_rows(v: V) -> bool:
    return v.each > 0


def candidates() -> list[V]:
    found: list[V] = []
    for shape in ("gate_up", "down", "qkv", "output", "head"):
        n, k, around = SHAPES[shape]
        gate = around == "gate"
        # int4, one token
        one = V("int4", shape, 1, 16, 1, 5, mode="words_sums")
        some = [
            one,
            replace(one, mode="words"),
            replace(one, stages=8),
            replace(one, ahead=1024),
            replace(one, bn=32, warps=2),
            replace(one, bn=32, warps=1, stages=4),
            replace(one, bn=16, warps=1, stages=3),
            replace(one, unroll=2, stages=4),
        ]
        if around in ("norm", "gate"):
            some += [
                replace(one, apart=True),
                replace(one, apart=True, bn=64, warps=4, stages=4),
                replace(one, ahead=2048, stages=8),
            ]
        else:
            some += [replace(one, bn=64, warps=4, stages=4), replace(one, ahead=2048, stages=8)]
        if shape in ("down", "output", "qkv"):
            more = (2, 4) if shape != "qkv" else (2,)
            some += [replace(one, splits=split, apart=True) for split in more]
            some += [replace(one, splits=split, apart=True, stages=8) for split in more]
        if shape in ("gate_up", "down"):
            some += [replace(one, width=128, stages=stages, mode="sums") for stages in (3, 5)]
        found += some
        # int4, 64 and 16 tokens
        for tokens in (64, 16):
            base = V("int4", shape, tokens, 128, 8, 3, mode="words")
            some = [
                base,
                replace(base, mode="words_sums"),
                replace(base, bn=64, warps=4),
                replace(base, bn=64, warps=4, mode="words_sums"),
                replace(base, warps=4),
            ]
            if tokens == 64:
                some += [replace(base, bn=256)]
            else:
                some += [
                    replace(base, bn=32, warps=2, stages=4),
                    replace(base, bn=16, warps=1, stages=5, mode="words_sums"),
                    replace(base, bn=32, warps=2, stages=4, mode="words_sums"),
                ]
            if gate:
                some = [replace(v, bn=max(v.bn // 2, 16)) for v in some]
                some += [replace(base, bn=64, warps=4)]
            if shape in ("down", "output", "qkv"):
                split = []
                for v in some:
                    count = n // v.bn
                    for times in (2, 4, 8):
                        if 100 < count * times <= 560:
                            split.append(replace(v, splits=times))
                            break
                some = [v for v in some if n // v.bn >= 100] + split
            found += some
        # 8 bits, one token
        for kind in ("fp8", "int8"):
            big = k > 8192
            for bn, warps, stages, each in (
                ((2, 8, 3, 1), (2, 8, 2, 2), (4, 16, 2, 1), (1, 8, 3, 2), (2, 16, 3, 1))
                if big
                else ((4, 4, 4, 4), (8, 4, 3, 2), (4, 8, 4, 2), (2, 4, 4, 4), (8, 8, 3, 2))
            ):
                found.append(
                    V(kind, shape, 1, bn, warps, stages, mode="rows", each=each, ahead=1024)
                )
        base = V("int8", shape, 1, 16, 1, 6, mode="row")
        found += [base, replace(base, ahead=1024), replace(base, unroll=2, stages=4)]
        found += [replace(base, bn=32, warps=2)]
        if shape in ("down", "output"):
            found += [replace(base, splits=2), replace(base, splits=4)]
        base = V("int8", shape, 64, 64 if gate else 128, 8, 3, mode="row")
        some = [base, replace(base, bn=64, warps=4)]
        if shape in ("down", "output", "qkv"):
            some = [replace(v, splits=4 if v.bn == 128 else 2) for v in some]
        found += some
        # the rarer ones
        if shape not in ("gate_up", "down"):
            continue
        for kind, width in (("nf4", 64), ("mxfp4", 32), ("groups8", 64)):
            base = V(kind, shape, 1, 16, 1, 5, width=width)
            found += [base, replace(base, bn=32, warps=2), replace(base, bn=32, warps=1)]
            base = V(kind, shape, 64, 64 if gate else 128, 8, 3, width=width)
            more = [base, replace(base, bn=64, warps=4)]
            if shape == "down":
                more = [replace(v, splits=4) for v in more]
            found += more
    return found


@cache
def inputs(tokens: int, k: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)


def weight_of(v: V) -> Any:
    n, k, _ = around_of(v.shape)
    if is_rows(v):
        return Bytes(v.kind, n, k)
    return Packed(v.kind, n, k, v.width, "words" in v.mode)


def output_of(v: V) -> int:
    rows, _, around = around_of(v.shape)
    return rows // 2 if around == "gate" else rows


def call(v: V, w: Any, x: torch.Tensor, y: torch.Tensor, nw: torch.Tensor) -> None:
    (launch_rows8 if is_rows(v) else launch_planes)(v, w, x, y, nw)


def warm(v: V) -> str | None:
    """Compile; what went wrong."""
    try:
        with torch.inference_mode():
            _, k, _ = around_of(v.shape)
            x = torch.zeros(v.tokens, k, device=DEVICE, dtype=torch.bfloat16)
            y = torch.zeros(v.tokens, output_of(v), device=DEVICE, dtype=torch.bfloat16)
            nw = torch.ones(k, device=DEVICE, dtype=torch.bfloat16)
            call(v, weight_of(v), x, y, nw)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{v.kind} {v.shape} {v.tokens} {v}: {type(error).__name__} {str(error)[:150]}"
    return None


def expected(v: V, dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    around = around_of(v.shape)[2]
    x = x.float()
    if around in ("norm", "gate"):
        x = torch.nn.functional.rms_norm(x, (x.shape[1],), eps=1e-5)
    if v.kind == "fp8":
        step = x.abs().amax(1, keepdim=True) / 448
        x = (x / step).to(torch.float8_e4m3fn).float() * step
    y = x @ dense.t()
    if around == "gate":
        gate, up = y.chunk(2, 1)
        y = torch.nn.functional.silu(gate) * up
    return y


def run(v: V, weights: list[Any], truth: torch.Tensor) -> None:
    _, k, _ = around_of(v.shape)
    x = inputs(v.tokens, k)
    nw = torch.ones(k, device=DEVICE, dtype=torch.bfloat16)
    y = torch.zeros(v.tokens, output_of(v), device=DEVICE, dtype=torch.bfloat16)
    call(v, weights[0], x, y, nw)
    error = ((y.float() - truth).norm() / truth.norm()).item()
    taken = timed([lambda w=w: call(v, w, x, y, nw) for w in weights])
    rate = weights[0].nbytes / taken
    wrong = "" if error < 3e-2 else "  WRONG"
    print(
        f"{v.kind:8s} {v.shape:8s} {v.tokens:3d} {taken * 1e6:7.1f} us {rate / 1e9:6.0f} GB/s "
        f"{rate / HBM:4.0%}  {v}  e{error:.0e}{wrong}",
        flush=True,
    )


def today(kind: str, shape: str) -> None:
    n, k, around = SHAPES[shape]
    drawn = torch.randn(n, k, device=DEVICE) * k**-0.5
    first = KINDS[kind](drawn)
    count = max(ROTATED // first.nbytes, 2)
    weights = [first, *(KINDS[kind](drawn.roll(i, 0)) for i in range(1, count))]
    products = [made(w, around, None) for w in weights]
    for tokens in (1, 16, 64):
        x = inputs(tokens, k)
        taken = timed([lambda p=p: p(x) for p in products])
        rate = first.nbytes / taken
        print(
            f"{kind:8s} {shape:8s} {tokens:3d} {taken * 1e6:7.1f} us {rate / 1e9:6.0f} GB/s "
            f"{rate / HBM:4.0%}  TODAY",
            flush=True,
        )


def warm_today(pair: tuple[str, str]) -> str | None:
    kind, shape = pair
    try:
        with torch.inference_mode():
            n, k, around = SHAPES[shape]
            product = made(KINDS[kind](torch.randn(n, k, device=DEVICE)), around, None)
            for tokens in (1, 16, 64):
                product(torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16))
            torch.cuda.synchronize()
    except Exception as error:
        return f"today {kind} {shape}: {type(error).__name__} {str(error)[:150]}"
    return None


def floor(layers: int) -> str | None:
    """Steps of the 8B shape in bfloat16, and those without any product."""
    import gpu_decode_step as steps
    import gpu_products

    from tokenpod.kernels.triton import OPERATIONS
    from tokenpod.models.decoder import Decoder

    def linear(weight: Any, bias: Any, *more: Any) -> Any:
        n = len(weight) // 2 if more and more[-1] is not None else len(weight)
        made: dict[int, torch.Tensor] = {}

        def nothing(x: torch.Tensor, delta: Any = None) -> torch.Tensor:
            if len(x) not in made:
                made[len(x)] = torch.zeros(len(x), n, dtype=x.dtype, device=x.device)
            return made[len(x)]

        return nothing

    def add(weight: Any, bias: Any) -> Any:
        return lambda x, residual, delta=None: None

    try:
        steps.LAYERS = layers
        gpu_products.LAYERS = layers
        steps.SLOTS = 64 * 1024
        with torch.inference_mode():
            stage = steps.make_stage()
            none = replace(
                OPERATIONS,
                prepare_linear=linear,
                prepare_norm_linear=linear,
                prepare_add_linear=add,
            )

            class Nothing:
                weights, pool = stage.weights, stage.pool

                def decoder(self, choice: Any) -> Any:
                    return Decoder(steps.config(), dict(stage.weights), none)

            class Whole(Nothing):
                def decoder(self, choice: Any) -> Any:
                    return Decoder(steps.config(), dict(stage.weights), OPERATIONS)

            for rows, context in ((1, 256), (16, 1024), (64, 1024)):
                batch = steps.make_batch(rows, context)
                for name, each in (("whole", Whole()), ("without products", Nothing())):
                    taken = steps.time_step(each, batch, {}).seconds
                    if layers > 2:
                        print(f"step {rows} x {context} {name}: {taken * 1e3:.3f} ms", flush=True)
    except Exception as error:
        return f"floor: {type(error).__name__} {str(error)[:300]}"
    return None


def warm_any(job: Any) -> str | None:
    if job == "floor":
        return floor(1)
    return warm(job) if isinstance(job, V) else warm_today(job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=115)
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {triton.__version__}")
    every = candidates()
    old = [
        (kind, shape)
        for shape in ("gate_up", "down", "qkv", "output", "head")
        for kind in ("bf16", "int4", "fp8", "int8")
    ]
    workers = max(1, min(15, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs: list[Any] = ["floor", *old, *every]
        problems = dict(zip(jobs, pool.map(warm_any, jobs), strict=True))
    print(f"{len(jobs)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    for problem in problems.values():
        if problem:
            print("FAILED", problem)
    if not problems["floor"]:
        print(floor(32))
        torch.cuda.empty_cache()
    with torch.inference_mode():
        for kind, shape in old:
            if not problems[kind, shape]:
                today(kind, shape)
        cases: dict[tuple[str, str, int, bool, bool], list[V]] = {}
        for v in every:
            if not problems[v]:
                key = (v.kind, v.shape, v.width, "words" in v.mode, is_rows(v))
                cases.setdefault(key, []).append(v)
        order = sorted(
            cases, key=lambda key: ("int4", "fp8").index(key[0]) if key[0] in ("int4", "fp8") else 2
        )
        for key in order:
            some = cases[key]
            if time.monotonic() - began > options.seconds - 3:
                print(
                    "the time is over: not timed",
                    [f"{v.kind} {v.shape} {v.tokens} {v}" for v in some],
                )
                continue
            torch.manual_seed(3)
            first = weight_of(some[0])
            weights = [first]
            while len(weights) < max(ROTATED // first.nbytes, 2):
                weights.append(weight_of(some[0]))
            dense = first.dequantised()
            truths: dict[int, torch.Tensor] = {}
            for v in some:
                if v.tokens not in truths:
                    truths[v.tokens] = expected(v, dense, inputs(v.tokens, dense.shape[1]))
                try:
                    run(v, weights, truths[v.tokens])
                except Exception as error:
                    print("FAILED", v.kind, v.shape, v.tokens, v, str(error)[:100])
            del weights, first, dense, truths
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
