"""Prompts' attention over latent rows, absorbed or with keys and values made: ms, bytes at a time.

Of DeepSeek-V2-Lite (16 heads; latents of 512 and 64) unless `--heads` says otherwise. Of contexts
above 16,384 they are made part by part.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.cases.attention import batch_of
from benchmarks.support.limits import MATRIX_RATE
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    by_turns,
    error_of,
    events_seconds,
    reporting,
    synchronise,
)
from tokenpod.kernels.attention import composed_latent
from tokenpod.kernels.backends.registry import operations_for
from tokenpod.kernels.operations.attention_ops import LatentShape

GPU = DEVICE.type == "cuda"
SMOKE = {"cpu": "--prompts 200/300 --heads 2", "gpu": "--prompts 512/17000"}
#: Of ‖one - other‖ / ‖other‖.
TOLERANCE = 2e-2
SHAPE = LatentShape(rank=512, rope=64, nope=128, value=128)


def options(parser: argparse.ArgumentParser) -> None:
    prompts = ["2048/2048", "2048/16384", "2048/32768", "2048/65536", "512/65536"]
    parser.add_argument("--prompts", nargs="*", default=prompts, metavar="QUERIES/CONTEXT")
    parser.add_argument("--heads", type=int, default=16)


def run(asked: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(1)
    with torch.inference_mode():
        for spec in asked.prompts:
            queries, context = map(int, spec.split("/"))
            with reporting(f"{queries} queries of {context}"):
                time_prompt(queries, context, asked.heads, report)


def time_prompt(queries: int, context: int, heads: int, report: Report) -> None:
    """A row of so many tokens at the end of its context, in both ways by turns."""
    batch, slots = batch_of([queries], [context])
    rows = torch.zeros(queries, dtype=torch.int64, device=DEVICE)
    places = torch.arange(context - queries, context, device=DEVICE)
    assert batch.paged is not None
    batch = replace(batch, t_place=places, paged=replace(batch.paged, t_row=rows))
    ops = operations_for(DEVICE)
    pool = torch.randn(slots + 16, 1, SHAPE.rank + SHAPE.rope, device=DEVICE).to(DTYPE)
    up = torch.randn(heads, SHAPE.nope + SHAPE.value, SHAPE.rank, device=DEVICE)
    up = (up * SHAPE.rank**-0.5).to(DTYPE)
    q = torch.randn(queries, heads, SHAPE.nope + SHAPE.rope, device=DEVICE).to(DTYPE)
    scale = (SHAPE.nope + SHAPE.rope) ** -0.5
    with patch.object(composed_latent, "_expands", lambda *args: False):
        plans = {"absorbed": ops.plan_latent(batch, SHAPE)}
    plans["made"] = ops.plan_latent(batch, SHAPE)
    ways = {
        name: partial(ops.attend_latent, q, pool, up, SHAPE, plan, scale)
        for name, plan in plans.items()
    }
    found = {name: way() for name, way in ways.items()}
    if (off := error_of(found["made"].float(), found["absorbed"].float())) > TOLERANCE:
        print(f"WRONG {queries} queries of {context}: {off:.1e} apart")
    found.clear()
    timed = {name: partial(events_seconds, way) for name, way in ways.items()}
    seconds = by_turns(timed, rounds=5)
    pairs = queries * (context - queries) + queries * (queries + 1) // 2
    operations = 2 * heads * (SHAPE.nope + SHAPE.rope + SHAPE.value) * pairs
    for name, way in ways.items():
        taken = statistics.median(seconds[name])
        report.row(
            "latents",
            queries=queries,
            context=context,
            way=name,
            ms=1e3 * taken,
            limit_share=operations / taken / MATRIX_RATE,
            MB=most_bytes(way) / 1e6,
        )


def most_bytes(way: Callable[[], torch.Tensor]) -> int:
    """Bytes of a GPU that a call takes at a time, its result counted; 0 on a CPU."""
    if not GPU:
        return 0
    synchronise()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way()
    return torch.cuda.max_memory_allocated() - before
