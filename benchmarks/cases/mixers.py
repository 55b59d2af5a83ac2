"""Mixers that keep states: decode (TB/s) and prompts, by tile.

The gated delta net of Qwen3.5-9B, with `--key-decays` that of Kimi Linear 48B, or with
`--state-space` the state space of Nemotron-H 8B. Decode runs as replayed graphs over states that
exceed the L2 cache together; its limit is that each state is read and written once. `--search`
tries other tiles, for kernels/mixers/triton_delta.py and triton_space.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple
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
from tokenpod.kernels.mixers import triton_delta, triton_space
from tokenpod.kernels.mixers.recurrent_plan import StepTile, plan_recurrent, step_tile
from tokenpod.kernels.mixers.triton_delta import PromptTile
from tokenpod.kernels.operations.batch import ForwardBatch, PagedRows
from tokenpod.kernels.operations.pointwise_ops import RowNorm
from tokenpod.kernels.operations.recurrent_ops import (
    DeltaInputs,
    DeltaWeights,
    MemoryShape,
    RecurrentStates,
    SpaceInputs,
    SpaceWeights,
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
SPACE_PROMPTS = [
    triton_space.PromptTile(*each)
    for each in (
        (64, 64, 8, 2),
        (64, 32, 4, 2),
        (64, 64, 4, 1),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
        (32, 64, 4, 2),
        (64, 64, 4, 3),
    )
]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 4, 16, 64, 256], help="rows")
    parser.add_argument("--prompts", nargs="*", default=["8192", "256", "16x64"], help="[ROWSx]LEN")
    names = ("KEYS", "VALUES", "KEY_DIM", "VALUE_DIM")
    parser.add_argument("--shape", nargs=4, type=int, metavar=names)
    parser.add_argument("--state-space", action="store_true", help="instead of a gated delta net")
    parser.add_argument(
        "--key-decays",
        action="store_true",
        help="each number of a key decays by itself (Kimi Linear)",
    )
    parser.add_argument("--search", action="store_true", help="other tiles, too")
    parser.add_argument("--kernels", action="store_true", help="each kernel of prompts")


def run(asked: argparse.Namespace, report: Report) -> None:
    kind = SPACE if asked.state_space else KEY_DECAYS if asked.key_decays else DELTA
    shape = MemoryShape(*(asked.shape or kind.shape), width=4)
    with torch.inference_mode():
        for rows in asked.decode:
            tiles = [StepTile(*each) for each in SEARCHED if asked.search]
            own_tile = step_tile(kind.module.STEP_TILES, rows * shape.value_heads)
            for tile in [own_tile, *tiles]:
                with reporting(f"{rows} rows, {tile}"):
                    decode(kind, shape, rows, tile, report)
        for spec in asked.prompts:
            rows, length = map(int, f"1x{spec}".split("x")[-2:])
            own = kind.module.PROMPT_TILE
            for tile in [own, *(kind.prompts if asked.search else ())]:
                with reporting(f"{spec}, {tile}"), patch.object(kind.module, "PROMPT_TILE", tile):
                    prompts(kind, shape, rows, length, report, kernels=asked.kernels)


def decode(kind: Kind, shape: MemoryShape, rows: int, tile: StepTile, report: Report) -> None:
    """Steps of so many rows."""
    state = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    copies = max(1, min(64, ROTATED_BYTES // (rows * state)))
    calls = [kind.call(shape, [1] * rows) for _ in range(copies if DEVICE.type == "cuda" else 1)]
    with patch.object(kind.module, "STEP_TILES", ((float("inf"), tile),)):
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


def prompts(
    kind: Kind, shape: MemoryShape, rows: int, length: int, report: Report, *, kernels: bool
) -> None:
    """Prompts of so many tokens each."""
    one = kind.call(shape, [length] * rows)
    seconds = graph_seconds(one)
    tile = asdict(kind.module.PROMPT_TILE)
    report.row("prompts", rows=rows, tokens=length, **tile, us=1e6 * seconds)
    if kernels and DEVICE.type == "cuda":
        synchronise()
        for name, microseconds in profiled(one)[1]:
            print(f"    {microseconds:9.1f} us  {name}")


def draw(*sizes: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(sizes, device=DEVICE).to(dtype)


def delta(shape: MemoryShape, lengths: list[int], *, decays: int = 1) -> Callable[[], torch.Tensor]:
    """A gated delta net for rows of so many tokens each, none of which has any before.

    A head has so many decays: one, or as many as a key has numbers.
    """
    heads = shape.value_heads
    sizes = [shape.channels, shape.values, heads, heads * decays]
    inputs = DeltaInputs(*torch.split(draw(sum(lengths), sum(sizes)), sizes, dim=1))
    rates, shifts = draw(heads, dtype=torch.float32), draw(heads * decays, dtype=torch.float32)
    norm = RowNorm(draw(shape.value_dim), 1e-6)
    weights = DeltaWeights(draw(shape.channels, shape.width) / 2, rates, shifts, norm)
    states, batch = states_of(shape, len(lengths)), batch_of(lengths)
    plan = plan_recurrent(batch, triton_delta.PROMPT_TILE.chunk)
    return lambda: triton_delta.gated_delta(inputs, weights, shape, states, plan)


def key_decays(shape: MemoryShape, lengths: list[int]) -> Callable[[], torch.Tensor]:
    """The same, where each number of a key decays by itself."""
    return delta(shape, lengths, decays=shape.key_dim)


def space(shape: MemoryShape, lengths: list[int]) -> Callable[[], torch.Tensor]:
    """A state space for the same."""
    sizes = [shape.channels, shape.values, shape.value_heads]
    inputs = SpaceInputs(*torch.split(draw(sum(lengths), sum(sizes)), sizes, dim=1))
    each = draw(3, shape.value_heads, dtype=torch.float32)
    conv, bias = draw(shape.channels, shape.width) / 2, draw(shape.channels)
    norm = RowNorm(draw(shape.values), 1e-6)
    weights = SpaceWeights(conv, bias, *each, norm, shape.key_heads)
    states, plan = states_of(shape, len(lengths)), plan_recurrent(batch_of(lengths))
    return lambda: triton_space.state_space(inputs, weights, shape, states, plan)


class Kind(NamedTuple):
    """A mixer: the module with its tiles, its operation, others for prompts, and a shape."""

    module: Any
    call: Callable[[MemoryShape, list[int]], Callable[[], torch.Tensor]]
    prompts: list[Any]
    shape: tuple[int, int, int, int]


DELTA = Kind(triton_delta, delta, PROMPTS, (16, 32, 128, 128))
KEY_DECAYS = Kind(triton_delta, key_decays, PROMPTS, (32, 32, 128, 128))
SPACE = Kind(triton_space, space, SPACE_PROMPTS, (8, 128, 128, 64))


def states_of(shape: MemoryShape, rows: int) -> RecurrentStates:
    """Random ones, which have been through no position."""
    memory = rows, shape.value_heads, shape.key_dim, shape.value_dim
    return RecurrentStates(
        draw(rows, shape.channels, shape.width),
        torch.zeros(memory, device=DEVICE).normal_(),
        torch.zeros((rows, shape.value_heads), dtype=torch.int32, device=DEVICE),
    )


def batch_of(lengths: list[int]) -> ForwardBatch:
    """A step of rows of so many tokens each."""
    tokens, rows = sum(lengths), len(lengths)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
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
    return ForwardBatch(
        slots, slots, slots, starts, lengths, [[]] * rows, numbers, table, single, None, paged
    )
