"""Decode steps with LoRA and DoRA adapters on a GPU: checked, then beside steps without, by turns.

The decoder of an 8B shape in bf16, or with weights in fewer bits, captured in a graph: without
adapters, with slots of which no row has any, and with adapters on all products. First the kernels'
result is compared with the reference's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.support.models import (
    Shape,
    Weights,
    config_of,
    quantised,
    random_weights,
    shape_names,
    shape_of,
)
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, DTYPE, by_turns, captured, events_seconds, reporting
from tokenpod.kernels.backends import reference
from tokenpod.kernels.backends.triton import OPERATIONS
from tokenpod.kernels.cache.kv_pool import KVPool
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows
from tokenpod.models.adapters.files import Base
from tokenpod.models.adapters.store import AdapterStore, Space
from tokenpod.models.adapters.targets import Targets, products_of, vocabulary_products
from tokenpod.models.decoders.decoder import Decoder
from tokenpod.models.specs.weight_table import weights_of
from tokenpod.models.weights.names import Names
from tokenpod.models.weights.shard import WHOLE

SMOKE = {
    "cpu": "--shape nano --rank 4 --slots 2 --cases 2x16x2 --rounds 0",
    "gpu": "--shape tiny --slots 4 --cases 16x64x4 1x64x1 --rounds 1",
}
#: Of log probabilities, by rounding alone, after 32 layers in bfloat16.
TOLERANCE = 0.15


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=shape_names(), default="llama-3.1-8b")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--quantize", default="bf16", choices=["bf16", "int8", "fp8", "int4"])
    cases = ["64x1024x32", "64x1024x1", "16x1024x16", "1x1024x1"]
    parser.add_argument("--cases", nargs="*", default=cases, metavar="ROWSxCONTEXTxADAPTERS")
    parser.add_argument("--rounds", type=int, default=3, help="0: check, and time nothing")


def run(asked: argparse.Namespace, report: Report) -> None:
    shape = shape_of(asked.shape)
    cases = [tuple(map(int, spec.split("x"))) for spec in asked.cases]
    with torch.inference_mode():
        weights = random_weights(shape, DEVICE, DTYPE)
        stage = DecodeStep(shape, weights, [(rows, context) for rows, context, _ in cases])
        if asked.quantize != "bf16":
            stage.weights = quantised(weights, stage.config, asked.quantize, head=False)
        store = store_of(stage, asked)
        plain, ours = stage.decoder(), stage.decoder(adapters=store)
        for rows, context, count in cases:
            count = min(count, asked.slots)
            with reporting(f"{rows} x {context}, {count} adapters"):
                compare(stage, store, rows, context, count, report)
                if not asked.rounds:
                    continue
                ways: dict[str, tuple[Any, int, int]] = {
                    "without": (plain, 0, 0),
                    "slots unused": (ours, 0, 0),
                    "LoRA": (ours, count, 0),
                    "DoRA": (ours, count, 1),
                }

                def step(
                    way: tuple[Any, int, int], rows: int = rows, context: int = context
                ) -> float:
                    decoder, count, scaled = way
                    store.scales.scaled.fill_(scaled)
                    fields = {"t_adapter": slots_of(rows, count)} if count else {}
                    return 1e3 * stage.seconds(decoder, rows, context, **fields)

                found = by_turns(
                    {name: (lambda way=way: step(way)) for name, way in ways.items()},  # type: ignore[misc]
                    asked.rounds,
                    warm=int(DEVICE.type == "cuda"),
                )
                for name, times in found.items():
                    rate = min(found["without"]) / min(times)
                    cells = {"rows": rows, "context": context, "adapters": count, "way": name}
                    report.row("steps", **cells, ms=times, of_the_rate=rate)


def slots_of(rows: int, count: int) -> torch.Tensor:
    """Each row's adapter, from 1; so many different ones."""
    return torch.arange(rows, device=DEVICE) % count + 1


def store_of(stage: DecodeStep, asked: argparse.Namespace) -> AdapterStore:
    """Full of random adapters, whose products are small beside the base's."""
    weights = list(weights_of(stage.config, Names(), "model."))
    named = {product.name: product for product in products_of(weights, WHOLE)}
    base = Base(Targets("a benchmark's"), named, WHOLE, DTYPE, asked.rank)
    space = Space(asked.slots, asked.rank)
    tables = vocabulary_products(weights, WHOLE)
    store = AdapterStore(base, space, OPERATIONS, DEVICE, {}, tables)
    store._slots.normal_(std=0.02)
    store._ranks.fill_(asked.rank)
    # Near 1: after 32 layers the numbers are still those of a model.
    store.scales._table.uniform_(0.99, 1.01)
    return store


def compare(
    stage: DecodeStep, store: AdapterStore, rows: int, context: int, count: int, report: Report
) -> None:
    """With the reference's arithmetic of adapters; the rest of the step is the same."""
    batch = replace(stage.batch(rows, context), t_adapter=slots_of(rows, count))
    for scaled in (0, 1):
        store.scales.scaled.fill_(scaled)
        found = []
        for ops in (OPERATIONS, reference.OPERATIONS):
            own = {name: getattr(ops, name) for name in ("plan_adapters", "adapt", "adapt_rows")}
            store._ops = replace(OPERATIONS, **own)
            decoder = stage.decoder(ops=replace(OPERATIONS, adapted=ops.adapted), adapters=store)
            logits = decoder.logits(decoder.forward(batch, stage.pool), batch)
            found.append(logits.float().log_softmax(-1))
        store._ops = OPERATIONS
        off = float((found[0] - found[1]).abs().mean())
        kind = "DoRA" if scaled else "LoRA"
        report.row("checked", rows=rows, kind=kind, logprobs_differ_by=off)
        if not off < TOLERANCE:
            print(f"WRONG {rows} rows, {kind}: differ by {off:.3f}")


#: Adjacent slots of a row.
PIECE = 16


class DecodeStep:
    """A model's weights and a pool that is large enough for every (rows, context)."""

    def __init__(self, shape: Shape, weights: Weights, cases: Iterable[tuple[int, int]]) -> None:
        self.config, self.weights = config_of(shape), weights
        torch.manual_seed(0)
        self.pool = KVPool(
            slots=max(rows * context for rows, context in cases),
            layouts=self.config.kv_layouts,
            dtype=DTYPE,
            device=DEVICE,
        )
        for tensor in [*self.pool.keys, *self.pool.values]:
            tensor.normal_()

    def decoder(
        self, weights: Weights | None = None, ops: Any = OPERATIONS, **more: Any
    ) -> Decoder:
        """A decoder of these weights; `more` are further arguments of Decoder."""
        return Decoder(self.config, dict(weights or self.weights), ops, **more)

    def batch(self, rows: int, context: int) -> ForwardBatch:
        """Every row at its last position, its slots in scattered pieces."""
        torch.manual_seed(rows)
        pieces = torch.randperm(-(-rows * context // PIECE), device=DEVICE)
        slots = (pieces[:, None] * PIECE + torch.arange(PIECE, device=DEVICE)).view(rows, context)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
        return ForwardBatch(
            t_token=torch.randint(self.config.vocab_size, (rows,), device=DEVICE),
            t_place=torch.full((rows,), context - 1, device=DEVICE),
            t_slot=slots[:, -1].contiguous(),
            b_start=list(range(rows + 1)),
            b_context=[0] * rows,
            b_runs=[[]] * rows,
            b_row=[0] * rows,
            row_table=slots.to(torch.int32),
            single_rows=rows,
            logit_index=torch.arange(rows, device=DEVICE),
            paged=PagedRows(
                torch.arange(rows, **int32),
                torch.arange(rows + 1, **int32),
                torch.full((rows,), context, **int32),
            ),
        )

    def seconds(self, decoder: Decoder, rows: int, context: int, **fields: Any) -> float:
        """Of a captured step: the least of some rounds of replays; `fields` of the batch change."""
        batch = replace(self.batch(rows, context), **fields)
        logits: list[torch.Tensor] = []

        def run() -> None:
            logits[:] = [decoder.logits(decoder.forward(batch, self.pool), batch)]

        replay = captured(run)
        first, times = logits[0].clone(), []
        for _ in range(5 if DEVICE.type == "cuda" else 1):
            times.append(events_seconds(replay, 4 if DEVICE.type == "cuda" else 1))
            if not torch.equal(first, logits[0]):
                print(f"WRONG {rows} x {context}: replays differ")
        return min(times)
