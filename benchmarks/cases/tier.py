"""The native decoder beside the transformers tier: the same checkpoint through the same engine.

Random weights of the first layers of a published shape, greedy. What the tier takes beyond reading
its weights is its code's time on the host, so fewer layers leave the ratio as it is. A shape of no
family of ours runs through the tier alone, also behind texts of `--contexts` tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.cases import steps
from benchmarks.support.engine import Bench, Client, Engine
from benchmarks.support.models import config_of, first_layers, shape_names, shape_of
from benchmarks.support.report import Report
from benchmarks.support.timing import DEVICE, reporting
from tokenpod.engine.startup.memory import let_segments_grow
from tokenpod.models import load
from tokenpod.models.folder import is_native

GPU = DEVICE.type == "cuda"
SMOKE = {
    "cpu": "--shapes tiny-qwen3.5 --layers 4 --decode 1 --prompts 64 --rows 4",
    "gpu": "--shapes tiny-qwen3.5 --layers 4 --decode 1 --prompts 512 --rows 4",
}
CONTEXT, LONGEST = 256, 16_384


def options(parser: argparse.ArgumentParser) -> None:
    shapes = ["qwen3.5-9b", "granite-4-h-small", "nemotron-h-8b", "lfm2-2.6b"]
    parser.add_argument("--shapes", nargs="*", choices=shape_names(), default=shapes)
    parser.add_argument("--layers", type=int, default=8, help="the first of each shape")
    parser.add_argument("--decode", nargs="*", type=int, default=[1, 64], metavar="ROWS")
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048], metavar="TOKENS")
    parser.add_argument("--contexts", nargs="*", type=int, default=[CONTEXT], metavar="TOKENS")
    parser.add_argument("--rows", type=int, default=64, help="largest batch")


def run(asked: argparse.Namespace, report: Report) -> None:
    if GPU:
        let_segments_grow()
    # What `steps` asks besides.
    asked.prefill, asked.quantize, asked.quantize_head = 2048, "none", False
    asked.profile, asked.sampled = 0, False
    for name in asked.shapes:
        shape = first_layers(shape_of(name), asked.layers)
        # Both compute the same head.
        shape["vocab_size"] = min(shape["vocab_size"], 32_768)
        with reporting(name), tempfile.TemporaryDirectory() as folder:
            write(shape, Path(folder))
            if not is_native(Path(folder)):
                alone(name, Path(folder), asked, report)
                continue
            ours = measured(Path(folder), shape, asked, report, native=True)
            tier = measured(Path(folder), shape, asked, report, native=False)
            for what, seconds in ours.items():
                report.row(
                    "beside the tier",
                    shape=name,
                    layers=asked.layers,
                    what=what,
                    ours_ms=1e3 * seconds,
                    tier_ms=1e3 * tier[what],
                    times=tier[what] / seconds,
                )


def write(shape: dict[str, Any], folder: Path) -> None:
    """A checkpoint of transformers' own class."""
    import transformers

    found = getattr(transformers, shape["architectures"][0])
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = found.config_class(**{**shape, **ends, "dtype": "bfloat16"})
    torch.manual_seed(0)
    with torch.device(DEVICE):
        found._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def alone(name: str, folder: Path, asked: Any, report: Report) -> None:
    """Prompts, and steps of rows that decode, through the tier."""
    bench = bench_of(folder, asked, report, native=False)
    about = {"shape": name, "layers": asked.layers}
    for tokens in asked.prompts:
        seconds = min(bench.run([(tokens, 1)]).seconds for _ in range(2))
        report.row("tier alone, prompts", **about, tokens=tokens, ms=1e3 * seconds)
    for rows, context in product(asked.decode, asked.contexts):
        arrivals = bench.client.arrivals
        bench.run([(context, 24)] * rows)
        gaps = [b[0] - a[0] for a, b in pairwise(arrivals) if a[1] == b[1] == rows]
        step = 1e3 * median(gaps)
        cells = {"rows": rows, "context": context, "step_ms": step}
        report.row("tier alone", **about, **cells, layer_ms=step / asked.layers)


def bench_of(folder: Path, asked: Any, report: Report, *, native: bool) -> Bench:
    """An engine that serves the checkpoint."""
    with patch.object(load, "is_native", lambda folder: native):
        model = load.load_model(
            folder,
            dtype=torch.bfloat16 if GPU else torch.float32,
            device=DEVICE,
            progress=lambda done, total: None,
            max_total_tokens=LONGEST,
        )
    engine = Engine(
        model,  # type: ignore[arg-type]
        DEVICE,
        rows=asked.rows,
        positions=LONGEST,
        prefill=asked.prefill,
        max_batch_total_tokens=asked.rows * 512 + LONGEST,
        max_total_tokens=LONGEST,
    )
    client = Client()
    report.note(f"{'native' if native else 'tier'}: warm after {engine.warm_s:.1f} s")
    return Bench(engine.loop(client), client, engine.vocabulary)


def measured(
    folder: Path, shape: dict[str, Any], asked: Any, report: Report, *, native: bool
) -> dict[str, float]:
    """Seconds by what is computed."""
    bench, config = bench_of(folder, asked, report, native=native), config_of(shape)
    found = {}
    for rows in asked.decode:
        found[f"{rows} rows"] = steps.decode(bench, rows, CONTEXT, asked, config, report)
    for tokens in asked.prompts:
        found[f"prompt of {tokens}"] = steps.prompt(bench, tokens, asked, config, report)
    return found
