"""Weights in fewer bits on a GPU, in some two minutes: experts, and products in every format.

    python -P benchmarks/gpu_fewer_bits.py [--seconds 150]

Experts' blocks (router, sort and products) of Qwen3-30B-A3B and gpt-oss-20b with 1 and 64 tokens,
in every format beside bfloat16; products of an 8B Llama with 1 and 64 tokens in every format. Each
is checked against the reference. Prints microseconds, the ratio to bfloat16 and the share of the
read bandwidth of the weights' own bytes; of experts those that are chosen.

Kernels are compiled by several processes first. What is left when the time is over is not timed,
and that is said.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_quantised import MAKE, READ_RATE, SHAPES, TOLERANCE, Exact, inputs_of, made

from tokenpod.kernels.expert_ops import ExpertWeights, Routing
from tokenpod.kernels.formats.grouped import GroupedWeight, packed_pairs
from tokenpod.kernels.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.reference.experts import mixture
from tokenpod.kernels.triton.expert_routing import assign
from tokenpod.kernels.triton.expert_stacks import Stacks
from tokenpod.kernels.triton.expert_stacks import stack_of as stack_of_kernels
from tokenpod.kernels.triton.expert_tiles import STORED_TILES
from tokenpod.kernels.triton.experts import add_for_many, prepare_experts
from tokenpod.kernels.triton.pointwise import rms_norm
from tokenpod.kernels.weight import StackedWeight
from tokenpod.models.mxfp4 import VALUES

TOKENS = (1, 64)
#: Together larger than the L2 cache.
ROTATED_BYTES = 200 << 20
REPLAYS = 10
WORKERS = 12


def coded(weight: torch.Tensor, group: int, table: torch.Tensor | None) -> GroupedWeight:
    """Random codes of 4 bits; without a table those of MXFP4."""
    n, k = weight.shape
    codes = packed_pairs(torch.randint(16, (n, k), dtype=torch.uint8, device=weight.device))
    index = (torch.arange(k, device=weight.device) // group).to(torch.int32)
    shape = (n, k // group)
    if table is None:
        scale = torch.randint(117, 121, shape, dtype=torch.uint8, device=weight.device)
        return GroupedWeight(codes, scale, index, table=VALUES.to(weight.device))
    scale = torch.rand(shape, device=weight.device) * k**-0.5
    return GroupedWeight(codes, scale, index, table=table.to(weight.device))


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bf16": torch.Tensor.bfloat16,
    **MAKE,
    "groups8": GroupedWeight.made_of,
    "mxfp4": lambda weight: coded(weight, 32, None),
    "nf4": lambda weight: coded(weight, 64, torch.linspace(-1, 1, 16)),
}


@dataclass(frozen=True)
class Layer:
    """A mixture's."""

    name: str
    hidden: int
    width: int
    experts: int
    per_token: int
    activation: Activation
    kinds: tuple[str, ...]


LAYERS = (
    Layer(
        *("Qwen3-30B-A3B", 2048, 768, 128, 8, Activation.SILU),
        ("bf16", "fp8-blocks", "fp8", "int8", "int4", "mxfp4"),
    ),
    Layer(
        *("gpt-oss-20b", 2880, 2880, 32, 4, Activation.SWIGLU_CLAMPED),
        ("bf16", "mxfp4", "fp8", "int8", "int4"),
    ),
)


@dataclass(frozen=True)
class Case:
    """A layer's block, or a product of the 8B Llama, in a format."""

    kind: str
    layer: Layer | None = None
    shape: str = ""

    @property
    def name(self) -> str:
        return self.layer.name if self.layer else self.shape


def cases() -> Iterator[Case]:
    """In the order of what matters most."""
    for layer in LAYERS:
        for kind in layer.kinds:
            yield Case(kind, layer)
    for shape in ("gate_up", "qkv", "down", "output"):
        for kind in ("bf16", "int4", "int8", "fp8", "fp8-blocks", "mxfp4", "nf4", "groups8"):
            yield Case(kind, shape=shape)


def stack_of(kind: str, experts: int, outputs: int, inputs: int) -> Any:
    """Weights of all experts, of which every fourth is the same."""
    drawn = [
        KINDS[kind](torch.randn(outputs, inputs, device="cuda") * inputs**-0.5) for _ in range(4)
    ]
    parts = [drawn[i % 4] for i in range(experts)]
    if kind == "bf16":
        return torch.stack(parts)
    return StackedWeight(drawn[0].joined(parts), experts)


def timed(runs: list[Callable[[], object]]) -> float:
    """Seconds of one of them: the least of several replays of all, one behind the other."""
    runs[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times) / len(runs)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


def experts(
    case: Case, tokens: int, timing: bool, grouped: bool = False
) -> tuple[float, float, float]:
    """Seconds of a block, the bytes of experts that it reads, and its error; 0 if not timed.

    `grouped`: one token, too, by the kernel of many.
    """
    layer = case.layer
    assert layer is not None
    torch.manual_seed(1)
    count, hidden = layer.experts, layer.hidden
    weights = ExpertWeights(
        torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16) * hidden**-0.5,
        stack_of(case.kind, count, 2 * layer.width, hidden),
        stack_of(case.kind, count, hidden, layer.width),
    )
    routing = Routing(layer.per_token, normalised=True)
    norm = RowNorm(torch.ones(hidden, device="cuda", dtype=torch.bfloat16), 1e-6)
    size = (weights.gate_up.nbytes + weights.down.nbytes) / count
    block = prepare_experts(weights, norm, layer.activation, routing)
    if grouped:
        stacks = Stacks(
            *(stack_of_kernels(x, torch.bfloat16, (9, 0)) for x in (weights.gate_up, weights.down))
        )

        def block(residual: torch.Tensor, into: torch.Tensor | None = None) -> None:
            assert into is not None
            x = rms_norm(residual, norm.weight, norm.epsilon)
            chosen = assign(x, weights.router, routing)
            add_for_many(x, into, weights, stacks, layer.activation, chosen, STORED_TILES)

    inputs = [
        torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        for _ in range(24 if tokens == 1 else 2)
    ]
    got = torch.zeros_like(inputs[0])
    block(inputs[0], got)
    torch.cuda.synchronize()
    if not timing:
        return 0.0, 0.0, 0.0
    normed = rms_norm(inputs[0], norm.weight, norm.epsilon)
    exact = mixture(normed, weights, layer.activation, routing)
    error = error_of(got, exact)
    taken = timed([lambda x=x: block(x, got) for x in inputs])  # type: ignore[misc]
    chosen = count * (1 - (1 - layer.per_token / count) ** tokens)
    return taken, size * chosen, error


def weights_of(case: Case) -> list[Any]:
    n, k, _ = SHAPES[case.shape]
    torch.manual_seed(2)
    drawn = torch.randn(n, k, device="cuda") * k**-0.5
    first = KINDS[case.kind](drawn)
    count = max(ROTATED_BYTES // first.nbytes, 2)
    return [first, *(KINDS[case.kind](drawn.roll(i, 0)) for i in range(1, count))]


def product(
    case: Case, weights: list[Any], tokens: int, exact: Exact | None
) -> tuple[float, float]:
    """Seconds of a product, and its error; 0 without `exact`."""
    around = SHAPES[case.shape][2]
    x = inputs_of(tokens, weights[0].shape[1])
    runs = [made(weight, around, None) for weight in (weights if exact else weights[:1])]
    got = runs[0](x).clone()
    torch.cuda.synchronize()
    if exact is None:
        return 0.0, 0.0
    error = 0.0
    if case.kind != "bf16":
        error = error_of(got, exact.of(weights[0], around, tokens))
    return timed([lambda run=run: run(x) for run in runs]), error  # type: ignore[misc]


def run_once(case: Case) -> str | None:
    """Compile all kernels of a case into Triton's cache; what went wrong, if anything."""
    try:
        with torch.inference_mode():
            weights = None if case.layer else weights_of(case)[:1]
            for tokens in TOKENS:
                if weights is None:
                    experts(case, tokens, False)
                    if tokens == 1 and case.kind != "bf16":
                        experts(case, tokens, False, True)
                    continue
                product(case, weights, tokens, None)
    except Exception as error:
        return f"{case.name} {case.kind}: {type(error).__name__} {str(error)[:200]}"
    return None


def report(name: str, kind: str, tokens: int, taken: float, size: float, bf16: float) -> None:
    print(
        f"{name:14s} {kind:19s} {tokens:3d} tokens {taken * 1e6:8.1f} us {bf16 / taken:5.2f} x "
        f"{size / READ_RATE / taken:4.0%}",
        flush=True,
    )


def check(name: str, error: float) -> None:
    if not error < TOLERANCE:
        print(f"WRONG {name}: error {error:.1e}", flush=True)


def time_case(case: Case, bf16: dict[tuple[str, int], float]) -> None:
    weights, exact = None if case.layer else weights_of(case), Exact()
    for tokens in TOKENS:
        if weights is None:
            for grouped in (False, True) if tokens == 1 and case.kind != "bf16" else (False,):
                taken, size, error = experts(case, tokens, True, grouped)
                bf16.setdefault((case.name, tokens), taken)
                name = case.kind + (" as many" if grouped else "")
                report(case.name, name, tokens, taken, size, bf16[case.name, tokens])
                check(f"{case.name} {name}", error)
            continue
        taken, error = product(case, weights, tokens, exact)
        bf16.setdefault((case.name, tokens), taken)
        report(case.name, case.kind, tokens, taken, weights[0].nbytes, bf16[case.name, tokens])
        check(f"{case.name} {case.kind}", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, help="all of it, at most")
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    every = list(cases())
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        problems = dict(zip(every, pool.map(run_once, every), strict=True))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    bf16: dict[tuple[str, int], float] = {}
    with torch.inference_mode():
        for done, case in enumerate(every):
            if time.monotonic() - began > options.seconds - 5:
                print(f"{len(every) - done} of {len(every)} cases are left: the time is over")
                break
            if problems[case]:
                print(f"FAILED {problems[case]}", flush=True)
                continue
            time_case(case, bf16)


if __name__ == "__main__":
    main()
