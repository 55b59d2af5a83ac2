"""Mixtures of experts: a layer's sparse block by tokens and format, checked, beside the limits.

Router, sort and products of Qwen3-30B-A3B, gpt-oss-20b and Mixtral 8x7B, from one token to a
prompt, in bf16 and in fewer bits. The limit is the longer of reading the weights of the experts
that the tokens choose, evenly at random, and their operations.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.support.limits import BANDWIDTH, MATRIX_RATE
from benchmarks.support.models import FORMATS
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    captured,
    error_of,
    graph_seconds,
    profiled,
    reporting,
)
from tokenpod.kernels.experts import expert_tiles, triton_experts
from tokenpod.kernels.experts.reference_experts import mixture
from tokenpod.kernels.experts.triton_experts import prepare_experts
from tokenpod.kernels.operations.expert_ops import ExpertWeights, Routing
from tokenpod.kernels.operations.pointwise_ops import Activation, RowNorm
from tokenpod.kernels.operations.weight import StackedWeight
from tokenpod.kernels.pointwise.triton_pointwise import rms_norm

GPU = DEVICE.type == "cuda"
SMOKE = {
    "cpu": "--layers tiny --kinds bf16 int8 --tokens 1 4",
    "gpu": "--layers tiny Qwen3-30B-A3B --tokens 1 64",
}
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
    parser.add_argument("--one-as-many", action="store_true", help="one token by many's kernels")


def run(asked: argparse.Namespace, report: Report) -> None:
    jobs = [
        Case(LAYERS[name], kind)
        for name in asked.layers
        for kind in LAYERS[name].kinds
        if asked.kinds is None or kind in asked.kinds
    ]
    if asked.one_as_many:
        _take_one_as_many()
    bf16: dict[tuple[str, int], float] = {}
    with torch.inference_mode():
        for case in jobs:
            with reporting(f"{case.layer.name} {case.kind}"):
                time_block(case, asked.tokens, bf16, report, kernels=asked.kernels)


def _take_one_as_many() -> None:
    def dense(x: Any, into: Any, weights: Any, activation: Any, table: Any, tile: Any) -> None:
        stacks = triton_experts.Stacks(weights.gate_up, weights.down)
        many(x, into, weights, stacks, activation, table, expert_tiles.TILES)

    def stored(
        x: Any, into: Any, weights: Any, up: Any, down: Any, activation: Any, table: Any
    ) -> None:
        stacks = triton_experts.Stacks(up, down)
        many(x, into, weights, stacks, activation, table, expert_tiles.STORED_TILES)

    many: Any = triton_experts.add_for_many
    module: Any = triton_experts
    module.add_for_one, module.add_stored_for_one = dense, stored


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
