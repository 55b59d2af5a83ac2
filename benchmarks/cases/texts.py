"""Attention of whole texts, beside torch's of ragged ones: microseconds and TFLOP/s, by tile.

Queries, keys and values are parts of one product, as in an encoder's layer. Ragged texts, windows
and numbers by distance are compared with the reference first. `--search` tries other tiles, for
kernels/attention/text_tiles.py.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, NamedTuple

import torch

from benchmarks.support.limits import MATRIX_RATE
from benchmarks.support.report import Report
from benchmarks.support.timing import (
    DEVICE,
    DTYPE,
    compile_ahead,
    error_of,
    graph_seconds,
    reporting,
)
from tokenpod.kernels.attention import reference_texts
from tokenpod.kernels.attention.text_tiles import TextTile, cut_texts, text_tile_for
from tokenpod.kernels.attention.triton_texts import launch
from tokenpod.kernels.operations.attention_ops import NEAR_AND_FAR, TextOptions
from tokenpod.kernels.operations.batch import ForwardBatch

GPU = DEVICE.type == "cuda"
SMOKE = {"cpu": "--texts 2x24 --heads 2/1/16", "gpu": "--texts 8x512 --heads 12/12/64"}
HOPPER = (9, 0)
#: Of ‖got - truth‖ / ‖truth‖.
TOLERANCE = 7e-3
RAGGED = ((1, 2, 3), (17, 130, 129, 1, 64), (512, 1, 511), (5,) * 40, (1025, 700), (128, 256, 64))


class Job(NamedTuple):
    """A kernel to be compiled, for heads of queries, of keys and values, and numbers of one."""

    shape: tuple[int, ...]
    tile: TextTile


def options(parser: argparse.ArgumentParser) -> None:
    """Which texts and heads."""
    texts, heads = ["32x512", "256x64", "8x24", "4x8192"], ["12/12/64", "16/8/128", "3/1/256"]
    parser.add_argument("--texts", nargs="*", default=texts, metavar="TEXTSxTOKENS")
    parser.add_argument("--heads", nargs="*", default=heads, metavar="H/K/D")
    parser.add_argument("--search", action="store_true", help="other tiles, too")


def run(asked: argparse.Namespace, report: Report) -> None:
    """Each shape of heads: checked, then timed."""
    shapes = [tuple(map(int, each.split("/"))) for each in asked.heads]
    jobs = [Job(shape, tile) for shape in shapes for tile in _tiles(shape[2], asked.search)]
    broken = compile_ahead(jobs, _compile) if asked.search else set()
    with torch.inference_mode():
        for shape in shapes:
            table = text_tile_for(shape[2], DTYPE, HOPPER)
            for lengths in RAGGED if GPU else RAGGED[:2]:
                _check(Texts([*lengths], shape), table)
            for spec in asked.texts:
                with reporting(f"{spec} of {shape}"):
                    count, length = map(int, spec.split("x"))
                    tiles = [job.tile for job in jobs if job.shape == shape and job not in broken]
                    _time(Texts([length] * count, shape), tiles, table, report)


class Texts:
    """Texts of these lengths."""

    def __init__(self, lengths: list[int], shape: tuple[int, ...]) -> None:
        self.lengths, self.shape, (heads, kv_heads, head_dim) = lengths, shape, shape
        self.b_start = [0, *itertools.accumulate(lengths)]
        sizes = [count * head_dim for count in (heads, kv_heads, kv_heads)]
        made = torch.randn(self.b_start[-1], sum(sizes), device=DEVICE, dtype=DTYPE)
        self.parts = [part.unflatten(1, (-1, head_dim)) for part in made.split(sizes, 1)]
        self.out = torch.empty(len(made), heads * head_dim, device=DEVICE, dtype=DTYPE)
        self.operations = 4 * heads * head_dim * sum(n * n for n in lengths)

    def tiles(self, tile: TextTile) -> torch.Tensor:
        """On the device."""
        return torch.from_numpy(cut_texts(self.b_start, tile.block_m)).to(DEVICE)

    def error(self, tile: TextTile, options: TextOptions) -> float:
        """Against the reference in float32."""
        launch(*self.parts, self.out, self.tiles(tile), options, tile)
        none: Any = None
        t_token = torch.zeros(self.b_start[-1], dtype=torch.int64, device=DEVICE)
        batch = ForwardBatch(t_token, none, none, self.b_start, [], [], [], none, 0, None)
        plan, wide = reference_texts.plan_texts(batch), [x.float() for x in self.parts]
        return error_of(self.out, reference_texts.attend_texts(*wide, plan, options))

    def seconds(self, tile: TextTile) -> float:
        """Of one launch."""
        tiles = self.tiles(tile)
        return graph_seconds(lambda: launch(*self.parts, self.out, tiles, NEAR_AND_FAR, tile))

    def peer(self) -> float:
        """The same of torch's flash attention, keys repeated beforehand."""
        q, *others = self.parts
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in others)
        starts = torch.tensor(self.b_start, dtype=torch.int32, device=DEVICE)
        most, flash = max(self.lengths), torch.ops.aten._flash_attention_forward.default
        return graph_seconds(
            lambda: flash(q, keys, values, starts, starts, most, most, 0.0, False, False)
        )


def _check(texts: Texts, tile: TextTile) -> None:
    """All of a text or what is near, with numbers by distance or without."""
    table = torch.randn(texts.shape[0], 41, device=DEVICE)
    near = TextOptions(window=65), TextOptions(window=200)
    for options in (NEAR_AND_FAR, *near, TextOptions(distance_bias=table)):
        with reporting(f"{texts.lengths} {options.window}"):
            if not (off := texts.error(tile, options)) < TOLERANCE:
                print(f"WRONG {texts.shape} {texts.lengths} {options}: error {off:.1e}", flush=True)


def _time(texts: Texts, tiles: list[TextTile], table: TextTile, report: Report) -> None:
    found: dict[str, float] = {}
    for tile in tiles:
        with reporting(str(tile)):
            found["the table's" if tile == table else str(tile)] = texts.seconds(tile)
    if GPU:
        with reporting("torch's"):
            found["torch's"] = texts.peer()
    best = sorted(found, key=found.__getitem__)[:5]
    for name in dict.fromkeys(("the table's", "torch's", *best)):
        if name in found:
            sizes = {"texts": len(texts.lengths), "tokens": texts.lengths[0]}
            rate = texts.operations / found[name]
            share = {"TFLOP/s": rate / 1e12, "limit_share": rate / MATRIX_RATE, "tile": name}
            shape = "/".join(map(str, texts.shape))
            report.row("attention", **sizes, heads=shape, us=1e6 * found[name], **share)


def _tiles(head_dim: int, search: bool) -> list[TextTile]:
    table = text_tile_for(head_dim, DTYPE, HOPPER)
    sides = itertools.product([(64, 4), (128, 4), (128, 8)], (32, 64, 128), (2, 3))
    others = [TextTile(m, n, warps, stages) for (m, warps), n, stages in sides]
    return list(dict.fromkeys((table, *others))) if search else [table]


def _compile(job: Job) -> str | None:
    """One kernel, in a process of its own."""
    try:
        texts = Texts([130, 30], job.shape)
        launch(*texts.parts, texts.out, texts.tiles(job.tile), NEAR_AND_FAR, job.tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {str(error)[:80]}"
    return None
