"""Mixers that keep states: the gated delta net of Qwen3.5-9B, decode (TB/s) and prompts, by tile.

Decode runs as replayed graphs over states that exceed the L2 cache together; its limit is that each
state is read and written once. `--search` tries other tiles, for kernels/mixers/triton_delta.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from unittest.mock import patch

import torch

from benchmarks.support.limits import BANDWIDTH
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    ROTATED_BYTES,
    graph_seconds,
    profiled,
    reporting,
    synchronise,
)
from tokenpod.kernels.mixers import triton_delta
from tokenpod.kernels.mixers.recurrent_plan import plan_recurrent
from tokenpod.kernels.mixers.triton_delta import PromptTile, StepTile
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentStates,
)

SMOKE = {"cpu": "--shape 1 2 16 16 --decode 2 --prompts 70", "gpu": "--decode 1 64 --prompts 512"}
#: Values of a head that a program has, and its warps.
SEARCHED = [(16, 1), (16, 2), (32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)]
PROMPTS = [
    PromptTile(64, 2, 32, 4, 2),
    PromptTile(64, 8, 32, 4, 2),
    PromptTile(32, 4, 32, 4, 2),
    PromptTile(32, 2, 32, 4, 2),
    PromptTile(64, 4, 32, 8, 2),
    PromptTile(64, 4, 64, 4, 2),
    PromptTile(64, 4, 16, 4, 2),
    PromptTile(64, 4, 32, 4, 3),
    PromptTile(32, 2, 64, 4, 2),
    PromptTile(16, 1, 32, 4, 2),
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 4, 16, 64, 256], help="rows")
    parser.add_argument("--prompts", nargs="*", default=["8192", "256", "16x64"], help="[ROWSx]LEN")
    names = ("KEYS", "VALUES", "KEY_DIM", "VALUE_DIM")
    parser.add_argument("--shape", nargs=4, type=int, default=[16, 32, 128, 128], metavar=names)
    parser.add_argument("--search", action="store_true", help="other tiles, too")
    parser.add_argument("--kernels", action="store_true", help="each kernel of prompts")


def run(asked: argparse.Namespace, report: Report) -> None:
    shape = MemoryShape(*asked.shape, width=4)
    with torch.inference_mode():
        for rows in asked.decode:
            tiles = [StepTile(*each) for each in SEARCHED if asked.search]
            for tile in [triton_delta.step_tile(rows * shape.value_heads), *tiles]:
                with reporting(f"{rows} rows, {tile}"):
                    decode(shape, rows, tile, report)
        for spec in asked.prompts:
            rows, length = map(int, f"1x{spec}".split("x")[-2:])
            own = triton_delta.PROMPT_TILE
            for tile in [own, *(PROMPTS if asked.search else ())]:
                with reporting(f"{spec}, {tile}"), patch.object(triton_delta, "PROMPT_TILE", tile):
                    prompts(shape, rows, length, report, kernels=asked.kernels)


def decode(shape: MemoryShape, rows: int, tile: StepTile, report: Report) -> None:
    """Steps of so many rows."""
    state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    copies = max(1, min(64, ROTATED_BYTES // (rows * state)))
    calls = [call(shape, [1] * rows) for _ in range(copies if DEVICE.type == "cuda" else 1)]
    with patch.object(triton_delta, "STEP_TILES", ((float("inf"), tile),)):
        seconds = graph_seconds(calls)
    read = 2 * rows * state
    report.row(
        "decode",
        rows=rows,
        values=tile.values,
        warps=tile.warps,
        us=1e6 * seconds,
        **{"TB/s": read / seconds / 1e12, "limit_share": read / BANDWIDTH / seconds},
    )


def prompts(shape: MemoryShape, rows: int, length: int, report: Report, *, kernels: bool) -> None:
    """Prompts of so many tokens each."""
    one = call(shape, [length] * rows)
    seconds = graph_seconds(one)
    tile = asdict(triton_delta.PROMPT_TILE)
    report.row("prompts", rows=rows, tokens=length, **tile, us=1e6 * seconds)
    if kernels and DEVICE.type == "cuda":
        synchronise()
        for name, microseconds in profiled(one)[1]:
            print(f"    {microseconds:9.1f} us  {name}")


def call(shape: MemoryShape, lengths: list[int]) -> Callable[[], torch.Tensor]:
    """The operation for rows of so many tokens each, none of which has any before."""
    tokens, rows = sum(lengths), len(lengths)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]

    def draw(*sizes: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE).to(dtype)

    sizes = [shape.channels, shape.value_heads * shape.value_dim, *[shape.value_heads] * 2]
    inputs = DeltaInputs(*torch.split(draw(tokens, sum(sizes)), sizes, dim=1))
    rates, shifts = draw(2, shape.value_heads, dtype=torch.float32)
    norm = RowNorm(draw(shape.value_dim), 1e-6)
    weights = DeltaWeights(draw(shape.channels, shape.width) / 2, rates, shifts, norm)
    states = RecurrentStates(
        draw(rows, shape.channels, shape.width),
        torch.zeros(
            (rows, shape.value_heads, shape.key_dim, shape.value_dim), device=DEVICE
        ).normal_(),
        torch.zeros((rows, shape.value_heads), dtype=torch.int32, device=DEVICE),
    )
    numbers = [*range(rows)]
    paged = PagedRows(
        *(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (numbers, starts, lengths)),
        t_row=torch.tensor(numbers, device=DEVICE).repeat_interleave(
            torch.tensor(lengths, device=DEVICE)
        ),
    )
    slots = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    single = rows if tokens == rows else 0
    table = torch.zeros((rows, 1), dtype=torch.int32, device=DEVICE)
    batch = ForwardBatch(
        slots, slots, slots, starts, lengths, [[]] * rows, numbers, table, single, None, paged
    )
    plan = plan_recurrent(batch, triton_delta.PROMPT_TILE.chunk)
    return lambda: triton_delta.gated_delta(inputs, weights, shape, states, plan)
