"""Mixtures of experts: a layer's sparse block by tokens and format, checked, beside the limits.

Router, sort and products of Qwen3-30B-A3B, gpt-oss-20b and Mixtral 8x7B, from one token to a
prompt, in bf16 and in fewer bits. The limit is the longer of reading the weights of the experts
that the tokens choose, evenly at random, and their operations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch

from benchmarks.support.limits import BANDWIDTH, MATRIX_RATE
from benchmarks.support.models import FORMATS
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    captured,
    compile_ahead,
    error_of,
    graph_seconds,
    profiled,
    reporting,
    synchronise,
)
from tokenpod.kernels.experts.expert_tiles import (
    ANY,
    TILES,
    ProductTile,
    Tile,
    choose_tile,
    table_for,
)
from tokenpod.kernels.experts.reference_experts import mixture
from tokenpod.kernels.experts.triton_experts import prepare_experts
from tokenpod.kernels.operations.expert_ops import AddExperts, ExpertWeights, Routing
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm

GPU = DEVICE.type == "cuda"
SMOKE = {
    "cpu": "--layers tiny --kinds bf16 int8 --tokens 1 4",
    "gpu": "--layers tiny Qwen3-30B-A3B --tokens 1 64",
}
CAPABILITY = torch.cuda.get_device_capability() if GPU else None
TOLERANCE = 3e-2
EPSILON = 1e-6


@dataclass(frozen=True)
class Layer:
    """The sparse block of a model."""

    name: str
    hidden: int
    width: int
    experts: int
    per_token: int
    activation: Activation
    kinds: tuple[str, ...]

    @property
    def routing(self) -> Routing:
        """The softmax over those that are chosen."""
        return Routing(self.per_token, normalised=True)


LAYERS = {
    layer.name: layer
    for layer in (
        Layer(
            *("Qwen3-30B-A3B", 2048, 768, 128, 8, Activation.SILU),
            ("bf16", "fp8-blocks", "fp8", "int8", "int4", "mxfp4"),
        ),
        Layer(
            *("gpt-oss-20b", 2880, 2880, 32, 4, Activation.SWIGLU_CLAMPED),
            ("bf16", "mxfp4", "fp8", "int8", "int4"),
        ),
        Layer("Mixtral-8x7B", 4096, 14336, 8, 2, Activation.SILU, ("bf16",)),
        Layer("tiny", 256, 128, 8, 2, Activation.SILU, ("bf16", "fp8", "int8", "int4")),
    )
}


def options(parser: argparse.ArgumentParser) -> None:
    known = list(LAYERS)
    parser.add_argument("--layers", nargs="*", choices=known, default=known[:-1])
    parser.add_argument("--kinds", nargs="*", choices=FORMATS, help="default: what models have")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 64, 256, 2048])
    parser.add_argument("--kernels", action="store_true", help="what each kernel takes, too")
    parser.add_argument("--search", action="store_true", help="other tiles, too")


def run(asked: argparse.Namespace, report: Report) -> None:
    jobs = [
        Case(LAYERS[name], kind)
        for name in asked.layers
        for kind in LAYERS[name].kinds
        if asked.kinds is None or kind in asked.kinds
    ]
    bf16: dict[tuple[str, int], float] = {}
    with torch.inference_mode():
        for case in jobs:
            with reporting(f"{case.layer.name} {case.kind}"):
                if asked.search:
                    search(case, asked.tokens, report)
                else:
                    time_block(case, asked.tokens, bf16, report, kernels=asked.kernels)


@dataclass(frozen=True)
class Case:
    """A layer's block in a format."""

    layer: Layer
    kind: str

    def weights(self) -> ExpertWeights:
        """Random ones; in formats other than bf16 every fourth expert is the same."""
        torch.manual_seed(1)
        layer = self.layer
        router = torch.randn(layer.experts, layer.hidden, device=DEVICE) * layer.hidden**-0.5
        return ExpertWeights(
            router.to(DTYPE),
            self._stack(2 * layer.width, layer.hidden),
            self._stack(layer.hidden, layer.width),
        )

    def _stack(self, outputs: int, inputs: int) -> Any:
        count = self.layer.experts
        drawn = [
            FORMATS[self.kind](torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5)
            for _ in range(4)
        ]
        parts = [drawn[i % 4] for i in range(count)]
        if self.kind == "bf16":
            return torch.stack(parts)
        return StackedWeight(drawn[0].joined(parts), count)


#: Tiles that a search tries, both products with the same one: tokens of a program, rows of the
#: weight, inputs of a step, warps, stages; by the most tokens of an expert on average.
TRIED = {
    8: (
        *((16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 64, 256, 4, 3), (16, 64, 256, 4, 4)),
        *((16, 128, 128, 4, 4), (16, 128, 256, 4, 3), (16, 128, 64, 4, 5)),
    ),
    24: (
        *((32, 64, 128, 4, 4), (32, 128, 128, 4, 4), (32, 128, 64, 4, 5), (16, 128, 128, 4, 4)),
        *((64, 128, 128, 4, 3), (64, 128, 64, 4, 4)),
    ),
    64: (
        *((64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 128, 128, 8, 3), (64, 64, 128, 4, 3)),
        *((128, 128, 128, 8, 3), (128, 128, 64, 8, 4), (32, 128, 128, 4, 4), (64, 256, 128, 8, 3)),
    ),
    ANY: (
        *((128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (64, 128, 128, 4, 3)),
        *((128, 256, 128, 8, 2), (256, 128, 128, 8, 2), (256, 128, 64, 8, 4)),
        *((64, 256, 128, 8, 3), (64, 256, 64, 8, 4), (128, 128, 64, 4, 4)),
        *((64, 128, 128, 8, 4), (128, 128, 128, 8, 4), (128, 64, 128, 4, 4), (64, 64, 128, 4, 5)),
    ),
}


def search(case: Case, among: list[int], report: Report) -> None:
    """The fastest tiles of each number of tokens, beside the table's."""
    layer = case.layer
    jobs = [(case, tokens, tile) for tokens in among for tile in tiles_tried(case, tokens)]
    broken = compile_ahead(jobs, compile_one)
    block, table = changeable(case)
    for tokens in among:
        inputs = [torch.randn(tokens, layer.hidden, device=DEVICE, dtype=DTYPE) for _ in range(4)]
        truth, found = None, []
        for tile in tiles_tried(case, tokens):
            if (case, tokens, tile) in broken:
                continue
            with reporting(f"{layer.name} {case.kind} {tokens} {tile}"):
                table[:] = [(ANY, tile)]
                got = torch.zeros_like(inputs[0])
                block(inputs[0], got)
                truth = got.clone() if truth is None else truth
                off = error_of(got, truth)
                if not off < TOLERANCE:
                    print(f"WRONG {layer.name} {case.kind} {tokens} {tile}: error {off:.1e}")
                    continue
                taken = graph_seconds([partial(block, x, got) for x in inputs], rounds=3)
                found.append((taken, tile))
        for taken, tile in found[:1] + sorted(found[1:], key=itemgetter(0))[:4]:
            sizes = {"layer": layer.name, "format": case.kind, "tokens": tokens}
            name = " / ".join(
                f"{t.block_n} {t.block_k} {t.warps} {t.stages}" for t in (tile.gate_up, tile.down)
            )
            report.row("tiles", **sizes, us=1e6 * taken, tile=f"{tile.block_t}: {name}")


def tiles_tried(case: Case, tokens: int) -> list[Tile]:
    """For so many tokens, the table's first."""
    layer = case.layer
    form = "dense" if case.kind == "bf16" else "bytes" if "8" in case.kind else "lanes"
    table = table_for(DTYPE.itemsize, CAPABILITY, form)
    served = choose_tile(table, tokens * layer.per_token, layer.experts)
    mean = tokens * layer.per_token / layer.experts
    sizes = next(sizes for most, sizes in TRIED.items() if mean <= most)
    others = [Tile(size[0], ProductTile(*size[1:]), ProductTile(*size[1:])) for size in sizes]
    return list(dict.fromkeys([served, *others]))


@cache
def changeable(case: Case) -> tuple[AddExperts, list[tuple[float, Tile]]]:
    """A block, and the table of tiles that it looks into."""
    layer, table = case.layer, list(TILES)
    found: Any = table
    block = prepare_experts(case.weights(), norm_of(layer), layer.activation, layer.routing, found)
    return block, table


def compile_one(job: tuple[Case, int, Tile]) -> str | None:
    """A block's kernels, into Triton's cache; what went wrong, if anything."""
    case, tokens, tile = job
    try:
        with torch.inference_mode():
            block, table = changeable(case)
            table[:] = [(ANY, tile)]
            block(torch.randn(tokens, case.layer.hidden, device=DEVICE, dtype=DTYPE))
            synchronise()
    except Exception as error:
        return f"{case.kind} {tokens} {tile}: {str(error)[:100]}"
    return None


def norm_of(layer: Layer) -> RowNorm:
    """Of ones."""
    return RowNorm(torch.ones(layer.hidden, device=DEVICE, dtype=DTYPE), EPSILON)


def time_block(
    case: Case,
    among: list[int],
    bf16: dict[tuple[str, int], float],
    report: Report,
    *,
    kernels: bool,
) -> None:
    """A row for each number of tokens."""
    layer, weights, norm = case.layer, case.weights(), norm_of(case.layer)
    size = (weights.gate_up.nbytes + weights.down.nbytes) / layer.experts
    block = prepare_experts(weights, norm, layer.activation, layer.routing)
    for tokens in among:
        # Several, so that few tokens do not find their experts in the L2 cache.
        count = (24 if tokens == 1 else 4) if GPU else 1
        inputs = [
            torch.randn(tokens, layer.hidden, device=DEVICE, dtype=DTYPE) for _ in range(count)
        ]
        got = torch.zeros_like(inputs[0])
        block(inputs[0], got)
        normed = rms_norm(inputs[0], norm.weight, norm.epsilon)
        off = error_of(got, mixture(normed, weights, layer.activation, layer.routing))
        if not off < TOLERANCE:
            print(f"WRONG {layer.name} {case.kind} {tokens} tokens: error {off:.1e}")
        taken = graph_seconds([partial(block, x, got) for x in inputs])
        bf16.setdefault((layer.name, tokens), taken)
        chosen = layer.experts * (1 - (1 - layer.per_token / layer.experts) ** tokens)
        operations = 6 * tokens * layer.per_token * layer.width * layer.hidden
        limit = max(size * chosen / BANDWIDTH, operations / MATRIX_RATE)
        report.row(
            "blocks of experts",
            layer=layer.name,
            format=case.kind,
            tokens=tokens,
            us=1e6 * taken,
            times_bf16=bf16[layer.name, tokens] / taken,
            limit_us=1e6 * limit,
            limit_share=limit / taken,
            error=off,
        )
        if kernels and GPU:
            replay = captured(lambda: [block(x, got) for x in inputs])  # noqa: B023
            _, by_name = profiled(replay)
            for name, microseconds in by_name:
                report.row(
                    "kernels",
                    layer=layer.name,
                    format=case.kind,
                    tokens=tokens,
                    kernel=name,
                    us=microseconds / count,
                )
