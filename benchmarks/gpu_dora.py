"""Time steps with DoRA adapters on a GPU, which scale outputs, beside LoRA's, in one run.

    python -P benchmarks/gpu_dora.py
    python -P benchmarks/gpu_dora.py --rank 64 --slots 8 --quantize int8

The decoder of an 8B Llama shape, captured in graphs, as in gpu_lora.py: without adapters, with LoRA
alone, with DoRA, and with LoRA as it was when no adapter could scale outputs: then products that
end in the stream were added to it at once. In turns, each several times. Then products that end in
the stream alone, of many tokens too, and what an adapter's scales take to make beside nothing else.
First of all, results are compared with the reference's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_decode_step import Stage, config, make_batch, make_stage
from gpu_lora import captured_seconds, compare, make_store, step_seconds, with_adapters

from tokenpod.kernels.adapter_ops import (
    AdaptedAdd,
    AdapterWeights,
    Added,
    BaseLinear,
    DenseWeight,
)
from tokenpod.kernels.formats.fp8 import Fp8Weight
from tokenpod.kernels.formats.int4 import Int4Weight
from tokenpod.kernels.formats.int8 import Int8Weight
from tokenpod.kernels.triton import OPERATIONS, adapted, adapters
from tokenpod.kernels.triton.product import prepare_add_linear, prepare_linear
from tokenpod.kernels.weight import LinearWeight
from tokenpod.models.adapters.scales import Factors
from tokenpod.models.adapters.store import AdapterStore
from tokenpod.models.decoder import Decoder
from tokenpod.models.linear import Weights

#: Rows, context, and different adapters among the rows.
CASES = ((64, 1024, 32), (64, 1024, 1), (16, 1024, 16), (1, 1024, 1))
TURNS = 3
FORMATS = {"int8": Int8Weight, "fp8": Fp8Weight, "int4": Int4Weight}
PRODUCTS = ("qkv", "output", "up", "down")


def at_once(product: BaseLinear, dense: DenseWeight | None) -> AdaptedAdd:
    """The product added to the stream, and what adapters add behind it."""
    assert dense is not None
    add = prepare_add_linear(dense.weight, dense.bias)

    def add_product(x: torch.Tensor, residual: torch.Tensor, added: Added) -> None:
        def joined(x: torch.Tensor) -> torch.Tensor:
            add(x, residual)
            return residual

        _, inner = adapted._both(x, added, joined)
        adapters.expand(inner, added.weights, added.plan, residual)

    return add_product


def weights_of(stage: Stage, quantize: str | None) -> Weights:
    """The stage's, or nearest to them in a format."""
    made: Weights = dict(stage.weights)
    if quantize is not None:
        for name, weight in stage.weights.items():
            if name.endswith(PRODUCTS):
                made[name] = LinearWeight((FORMATS[quantize].made_of(weight.float()),))
    return made


def bare(weights: dict[str, AdapterWeights]) -> dict[str, AdapterWeights]:
    """Of adapters that can scale nothing."""
    return {name: replace(each, scale=None, scaled=None) for name, each in weights.items()}


def steps(stage: Stage, store: AdapterStore, quantize: str | None) -> None:
    """Print each case's captured steps."""
    weights = weights_of(stage, quantize)
    plain = Decoder(config(), dict(weights), OPERATIONS)
    ours = Decoder(config(), dict(weights), OPERATIONS, adapters=store)
    old = ours
    if quantize is None:
        ended = replace(OPERATIONS, adapted=replace(adapted.ADAPTED, add_linear=at_once))
        old = Decoder(config(), dict(weights), ended, adapters=store)
    views = store._weights
    for rows, context, count in CASES:
        batch = make_batch(rows, context)
        count = min(count, len(store.scales.scaled))
        own = with_adapters(batch, rows, count)
        base = step_seconds(plain, batch, stage)
        print(f"{rows} x {context}, {count} adapters: {base * 1e3:.3f} ms without", flush=True)
        kinds: dict[str, tuple[Decoder, bool, dict[str, AdapterWeights]]] = {
            "LoRA": (ours, False, views),
            "DoRA": (ours, True, views),
        }
        if quantize is None and rows > 1:
            kinds["LoRA, no scales, added at once"] = (old, False, bare(views))
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(TURNS):
            for kind, (decoder, scaled, own_views) in kinds.items():
                store._weights = own_views
                store.scales.scaled.fill_(int(scaled))
                found[kind].append(step_seconds(decoder, own, stage))
        store._weights = views
        for kind, times in found.items():
            seconds = statistics.median(times)
            told = ", ".join(f"{each * 1e3:.3f}" for each in times)
            print(f"  {kind}: {told} ms; {base / seconds:.3f} of the rate", flush=True)


def adds(stage: Stage, store: AdapterStore, count: int) -> None:
    """Print what products that end in the stream take, of several numbers of tokens."""
    names = [f"{i}.down" for i in range(8)]
    dense = [DenseWeight(stage.weights[name], None) for name in names]
    store.scales.scaled.fill_(1)
    for tokens in (16, 64, 128, 512, 2048):
        slots = torch.arange(tokens, device="cuda") % count + 1
        plan = adapters.plan_adapters(slots, store._ranks)
        x = torch.randn(tokens, dense[0].weight.shape[1], device="cuda", dtype=torch.bfloat16)
        stream = torch.zeros(tokens, len(dense[0].weight), device="cuda", dtype=torch.bfloat16)

        told = []
        for way, prepare, views in (
            ("at once", at_once, bare(store._weights)),
            ("apart", adapted.add_linear, bare(store._weights)),
            ("apart, scaled", adapted.add_linear, store._weights),
        ):
            products = [prepare(prepare_linear(each.weight, None), each) for each in dense]
            own = [Added(views[name], plan, adapters.adapt) for name in names]
            each = captured_seconds(partial(_add_all, products, own, x, stream), 8) / len(names)
            told.append(f"{way} {each * 1e6:.1f}")
        print(f"  down of {tokens} tokens, {count} adapters, microseconds: {', '.join(told)}")


def _add_all(
    products: list[AdaptedAdd], own: list[Added], x: torch.Tensor, stream: torch.Tensor
) -> None:
    for product, added in zip(products, own, strict=True):
        product(x, stream, added)


def making(stage: Stage, store: AdapterStore, rank: int, rest: Callable[[], None]) -> None:
    """Print how long it takes to make an adapter's scales, and how exact they are."""
    products = store._base.products
    start = time.perf_counter()
    for name in products:
        store.scales.measure(name, stage.weights[name])
    torch.cuda.synchronize()
    print(f"squares of the base: {(time.perf_counter() - start) * 1e3:.0f} ms")
    Decoder(config(), dict(stage.weights), OPERATIONS, adapters=store)
    factors: dict[str, dict[int, Factors]] = {}
    generator = torch.Generator().manual_seed(1)
    for name, product in products.items():
        for part, outputs in enumerate(product.rows):
            down = torch.randn(rank, product.inputs, generator=generator) / product.inputs**0.5
            up = torch.randn(outputs, rank, generator=generator) * 0.05
            lengths = torch.ones(outputs)
            factors.setdefault(name, {})[part] = Factors(down.bfloat16(), up.bfloat16(), lengths)
    for _ in range(3):
        start = time.perf_counter()
        made = store.scales.made(factors, rest)
        print(f"scales of an adapter of rank {rank}: {(time.perf_counter() - start) * 1e3:.0f} ms")
    assert made is not None
    for name in ("3.qkv", "5.down"):
        each = factors[name]
        delta = torch.cat([f.up.cuda().float() @ f.down.cuda().float() for f in each.values()])
        exact = 1 / (stage.weights[name].double() + delta.double()).norm(dim=1)
        own = store.scales.row(made, name)
        assert own is not None
        off = (own.cuda() / exact - 1).abs().max()
        print(f"  of {name}: at most {off:.1e} off")
        assert off < 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--quantize", choices=FORMATS, action="append", default=[])
    options = parser.parse_args()
    with torch.inference_mode():
        stage, store = make_stage(), make_store(options.slots, options.rank, options.rank)
        # Near 1: after 32 layers the numbers are still those of a model.
        store.scales._table.uniform_(0.99, 1.01)
        for scaled in (0, 1):
            store.scales.scaled.fill_(scaled)
            compare(stage, store)
        steps(stage, store, None)
        adds(stage, store, options.slots)
        making(stage, store, options.rank, lambda: None)
        for quantize in options.quantize:
            print(f"weights in {quantize}:")
            steps(stage, store, quantize)


if __name__ == "__main__":
    main()
