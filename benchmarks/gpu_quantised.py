"""Products with weights of 8 and 4 bits on a GPU, beside products of 16 bits.

    python -P benchmarks/gpu_quantised.py

Checks each kernel against float64 at the sizes that are timed, then prints for each kind of weight,
shape of an 8B Llama and number of tokens: microseconds and the share of the read bandwidth (of the
weight's own bytes), and the ratio to our product of 16 bits; for 8,192 tokens operations a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.formats.rounding import Number, Rounding
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.triton import product, quantised
from tokenpod.kernels.triton.quantised.tiles import Tiles

#: Bytes a second that an H200 reads, as benchmarks/gpu.py measured them.
READ_RATE = 4.617e12
#: (outputs, inputs, what is around) of an 8B Llama's products.
SHAPES = {
    "qkv": (6144, 4096, "norm"),
    "output": (4096, 4096, "add"),
    "gate_up": (28672, 4096, "gate"),
    "down": (4096, 14336, "add"),
    "head": (128256, 4096, "plain"),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MANY = 8192
#: Together larger than the L2 cache, so that every weight is read from memory.
ROTATED_BYTES = 200 << 20
REPLAYS = 10
#: Of a result, in bfloat16; more where inputs are rounded after a norm that is itself rounded.
TOLERANCE = 3e-2

Product = Callable[[torch.Tensor], torch.Tensor]
MAKE: dict[str, Callable[[torch.Tensor], Any]] = {
    "int8": Int8Weight.made_of,
    "int8-rounded": lambda w: replace(Int8Weight.made_of(w), rounding=Rounding(Number.INT8)),
    "fp8": Fp8Weight.made_of,
    "fp8-blocks": lambda w: Fp8Weight(
        (w / w.abs().amax() * 448).to(torch.float8_e4m3fn),
        torch.full((-(-len(w) // 128), w.shape[1] // 128), 1e-4, device=w.device),
        128,
        128,
        Rounding(Number.FP8, 128),
    ),
    "int4": Int4Weight.made_of,
}


def seconds(products: list[Product], x: torch.Tensor) -> float:
    """Of one product: the least of several replays of all, captured one behind the other."""
    for each in products[:1]:
        each(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in products:
            each(x)
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times) / len(products)


def made(weight: Any, around: str, tiles: Tiles | None) -> Product:
    """The product as a model has it."""
    norm = RowNorm(torch.ones(weight.shape[1], device="cuda", dtype=torch.bfloat16), 1e-5)
    dense = isinstance(weight, torch.Tensor)
    module: Any = product if dense else quantised
    more = (tiles,)
    if around in ("norm", "gate"):
        activation = Activation.SILU if around == "gate" else None
        return module.prepare_norm_linear(weight, None, norm, activation, *more)
    if around == "plain":
        return module.prepare_linear(weight, None, *more)
    add = module.prepare_add_linear(weight, None, *more)
    residual = torch.zeros((MANY, weight.shape[0]), device="cuda", dtype=torch.bfloat16)

    def added(x: torch.Tensor) -> torch.Tensor:
        add(x, residual[: len(x)])
        return residual[: len(x)]

    return added


@cache
def inputs_of(tokens: int, k: int) -> torch.Tensor:
    return torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)


class Exact:
    """What a weight's products are, in float32; the last few."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, weight: Any, around: str, tokens: int) -> torch.Tensor:
        if (id(weight), tokens) not in self._known:
            if len(self._known) > len(TOKENS):
                self._known.clear()
            x = inputs_of(tokens, weight.shape[1]).float()
            if around in ("norm", "gate"):
                x = torch.nn.functional.rms_norm(x, (x.shape[1],), eps=1e-5)
            y = weight.rounded_inputs(x) @ weight.dequantised(torch.float32).t()
            if around == "gate":
                gate, up = y.chunk(2, 1)
                y = torch.nn.functional.silu(gate) * up
            self._known[id(weight), tokens] = y
        return self._known[id(weight), tokens]


EXACT = Exact()


def check(name: str, weight: Any, around: str, tokens: int, tiles: Tiles | None) -> None:
    """Against float32; SystemExit if it is wrong."""
    got = made(weight, around, tiles)(inputs_of(tokens, weight.shape[1])).float()
    expected = EXACT.of(weight, around, tokens)
    error = ((got - expected).norm() / expected.norm()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"{name}, {tokens} tokens: error {error:.1e}")


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    for shape in options.shapes:
        n, k, around = SHAPES[shape]
        drawn = torch.randn(n, k, device="cuda") * k**-0.5
        count = max(ROTATED_BYTES // (2 * n * k), 1)
        dense = [made(drawn.roll(i, 0).bfloat16(), around, None) for i in range(count)]
        inputs = {
            tokens: torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
            for tokens in options.tokens
        }
        wide = {
            tokens: seconds(dense, x)
            for tokens, x in inputs.items()
            if shape != "head" or tokens < 99
        }
        del dense
        for kind in options.kinds:
            first = MAKE[kind](drawn)
            count = max(ROTATED_BYTES // first.nbytes, 2)
            weights = [first, *(MAKE[kind](drawn.roll(i, 0)) for i in range(1, count))]
            for tokens, x in inputs.items():
                if tokens not in wide:
                    continue
                check(f"{kind} {shape}", first, around, min(tokens, 300), None)
                some = weights if tokens < 99 else weights[:1]
                taken = seconds([made(w, around, None) for w in some], x)
                told = f"{taken * 1e6:8.1f} us {wide[tokens] / taken:5.2f} x"
                if tokens < 99:
                    told += f" {first.nbytes / READ_RATE / taken:4.0%}"
                else:
                    told += f" {2e-12 * n * k * tokens / taken:5.0f} TFLOP/s"
                print(f"{shape:8s} {kind:12s} {tokens:4d} tokens  {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=["int4", "int8", "fp8"])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="*", type=int, default=[*TOKENS, MANY])
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with torch.inference_mode():
        run(options)


if __name__ == "__main__":
    main()
