"""What a start takes: weights beside `readinto` of their files, and a pod until it serves.

A model's folder (or one that is made) is read cold and cached, by turns: by one thread's `readinto`
in pieces of 16 MiB into one buffer, and by what a server does, which leaves every weight in memory
of its own. Before a cold round the files' pages are dropped from the cache (posix_fadvise). Packing
weights for their products, which follows in a server, is no part of it. A pod is started --rounds
times: the first start may find no kernels compiled, the others do.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.support.models import make_checkpoint, shape_names, shape_of
from benchmarks.support.pod import Pod
from benchmarks.support.report import Report
from benchmarks.support.timing import by_turns, pair_ratios, synchronise
from tokenpod.models.checkpoints.checkpoint import Checkpoint
from tokenpod.models.folder import read_layout
from tokenpod.models.layers.reading import read_weights

PIECE = 16 * 2**20
SMOKE = {
    "cpu": "--shape tiny --rounds 1 --device cpu -- --max-batch-size 8",
    "gpu": "--shape tiny --rounds 1 --device cuda -- --max-batch-size 8",
}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="of a checkpoint; made if it is not there")
    parser.add_argument("--shape", choices=shape_names(), default="half-billion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where weights go")
    parser.add_argument(
        "--parts", nargs="*", choices=["weights", "pod"], default=["weights", "pod"]
    )
    parser.add_argument("flags", nargs="*", help="of tokenpod serve, after --")


def run(asked: argparse.Namespace, report: Report) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_checkpoint(asked.folder or Path(scratch) / "model", shape_of(asked.shape))
        if "weights" in asked.parts:
            torch.set_num_threads(1)
            torch.zeros(1, device=asked.device)
            for state in ("cold", "cached"):
                weights(folder, state, asked, report)
        for number in range(asked.rounds if "pod" in asked.parts else 0):
            with Pod(["--model-id", str(folder), "--device", asked.device, *asked.flags]) as pod:
                cells = {"start": number + 1, "seconds_to_SERVING": pod.started_s}
                report.row("pod", **cells, processor_s=sum(pod.processor().values()))


def weights(folder: Path, state: str, asked: argparse.Namespace, report: Report) -> None:
    """GB/s of both ways, by turns."""
    files = sorted(folder.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files) / 1e9

    def rate(way: str) -> float:
        if state == "cold":
            for path in files:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        if way == "readinto":
            buffer = memoryview(bytearray(PIECE))
            for path in files:
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
        else:
            with Checkpoint(folder) as checkpoint:
                read_weights(
                    checkpoint,
                    read_layout(folder, checkpoint).weights,
                    dtype=torch.bfloat16,
                    device=torch.device(asked.device),
                    progress=lambda *_: None,
                )
            synchronise()
        return size / (time.perf_counter() - began)

    ways = ("readinto", "weights")
    found = by_turns({way: (lambda way=way: rate(way)) for way in ways}, asked.rounds)  # type: ignore[misc]
    rates = {f"{way}_GB/s": found[way] for way in ways}
    ratio = pair_ratios(found["weights"], found["readinto"])
    report.row(f"weights of {size:.2f} GB", files=state, **rates, ratio=ratio)
