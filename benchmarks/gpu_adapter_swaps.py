"""Streams while adapters are loaded: what a set of LoRA adapters costs those who are served.

    python -P benchmarks/gpu_adapter_swaps.py            8B shape, 100 adapters of 42 MB, H200
    python -P benchmarks/gpu_adapter_swaps.py --cpu      a tiny shape, to try the script

A real engine process over its own link: 64 streams (--streams) of 1,024 tokens of context decode
while adapters are loaded from files one after the other (--at-once more), and as long again
without. The 100 adapters (--adapters, rank 8 on all products: 4.2 GB) are divided among five pairs
(--pairs), in each of which 20 are loaded as fast as the engine takes them; none is unloaded, so
each load allocates its memory anew. Every other pair begins with its half without loads. Each half
begins with the same prompts, cached. Printed of each: p50, p99 and the longest of the gaps between
a stream's tokens, by the engine's clock, and what the loads took. --turns prints at the end where
the engine's turns spend their time, without loads, with, and the longest of those, and what the
thread that reads was doing when these ended (it costs the turns a little).

    aim: the median of five pairs' ratios of p99 is at most 1.10
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

sys.path.insert(0, str(Path(__file__).resolve().parent))

from constrained_engine import LLAMA_8B
from gpu_serve import make_checkpoint

from tokenpod.core.link import Link
from tokenpod.core.messages import (
    Abort,
    AdapterDone,
    Broken,
    EngineOptions,
    FromEngine,
    LoadAdapter,
    Ready,
)
from tokenpod.core.outputs import StepOutputs
from tokenpod.core.requests import Request, StoppingParams
from tokenpod.core.sampling import SamplingParams

TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
#: Steps after a stream's first that do not count: prompts of others are in them.
SETTLING = 20


def make_adapters(
    folder: Path, model: dict[str, Any], count: int, rank: int, *, dora: bool = False
) -> int:
    """Adapters on all products, of one rank and of different numbers; bytes of one."""
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    query, key = (
        model[name] * model["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(model["num_hidden_layers"]):
        for name, (outputs, inputs) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            draw = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
            for end, shape in draw.items():
                tensors[f"{stem}.{end}.weight"] = (torch.randn(shape) * 0.01).to(torch.bfloat16)
            if dora:
                tensors[f"{stem}.lora_magnitude_vector"] = torch.ones(outputs)
    size = sum(tensor.nbytes for tensor in tensors.values())
    first = next(iter(tensors))
    whole = bytearray(save(tensors))
    # Where the first tensor's first number is: behind the header, at its own offset.
    header = 8 + int.from_bytes(whole[:8], "little")
    at = header + json.loads(whole[8:header])[first]["data_offsets"][0]
    for number in range(count):
        own = folder / f"a{number}"
        own.mkdir(parents=True)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "use_dora": dora}
        (own / "adapter_config.json").write_text(json.dumps(config))
        whole[at] = number % 128
        (own / "adapter_model.safetensors").write_bytes(whole)
    return size


class Engine:
    """An engine process and the link to it."""

    def __init__(self, options: EngineOptions, *, turns: bool = False) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "tokenpod.engine.process", str(theirs.fileno())]
        if turns:
            command[2:4] = [str(Path(__file__).with_name("adapter_turns.py"))]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.link: Link[FromEngine] = Link(ours, FromEngine)
        self.link.send(options)
        self.done: dict[int, AdapterDone] = {}
        #: Nanoseconds of each sequence's tokens.
        self.times: dict[int, list[int]] = {}
        self.next = 1

    def ready(self) -> Ready:
        """Wait until it is."""
        while True:
            for message in self.link.receive(None):
                if isinstance(message, Ready):
                    return message
                if isinstance(message, Broken):
                    raise SystemExit(message.message)

    def hear(self, seconds: float = 0.05) -> None:
        """Take what has come."""
        for message in self.link.receive(seconds):
            if isinstance(message, Broken):
                raise SystemExit(message.message)
            if isinstance(message, AdapterDone):
                self.done[message.op] = message
            elif isinstance(message, StepOutputs):
                assert not message.failures, message.failures[0].message
                for sequence in set(message.sequence_ids):
                    self.times.setdefault(sequence, []).append(message.at)

    def number(self) -> int:
        """One that was not given before."""
        self.next += 1
        return self.next

    def begin(self, streams: int, context: int, new: int) -> list[int]:
        """Start streams, and wait until all have had some tokens."""
        numbers = [self.number() for _ in range(streams)]
        for at, number in enumerate(numbers):
            prompt = [(at * 131 + i * 7) % 500 for i in range(context)]
            stopping = StoppingParams(max_new_tokens=new)
            self.link.send(Request([number], prompt, SamplingParams(), stopping))
        until = time.monotonic() + 60
        while any(len(self.times.get(number, ())) < SETTLING for number in numbers):
            assert time.monotonic() < until, "not all streams have begun: are there KV slots?"
            self.hear()
        return numbers

    def end(self, numbers: list[int], since: int) -> np.ndarray:
        """Abort streams; the gaps since a moment of the engine's clock, in milliseconds."""
        self.link.send(Abort(numbers))
        self.hear(0.2)
        gaps = [
            (after - before) / 1e6
            for number in numbers
            for before, after in pairwise(self.times.pop(number))
            if before >= since
        ]
        return np.array(gaps)

    def load(self, numbers: range, at_once: int) -> float:
        """Load adapters from their folders, so many at a time; seconds."""
        began, under_way = time.perf_counter(), set[int]()
        for at in numbers:
            op = self.number()
            self.link.send(LoadAdapter(op, f"new{at}", f"a{at}"))
            under_way.add(op)
            while len(under_way) >= at_once:
                self.hear()
                under_way -= self.done.keys()
        while under_way:
            self.hear()
            under_way -= self.done.keys()
        problems = [done.message for done in self.done.values() if done.message]
        assert not problems, problems[0]
        return time.perf_counter() - began

    def close(self) -> None:
        """End the process."""
        self.link.close()
        self.process.wait(60)


def measured(engine: Engine, asked: argparse.Namespace) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The gaps of each pair, without loads and with."""
    each, took = asked.adapters // asked.pairs, asked.seconds
    for pair in range(asked.pairs):
        halves = {}
        for loads in (pair % 2 == 0, pair % 2 == 1):
            streams = engine.begin(asked.streams, asked.context, asked.new)
            since = time.monotonic_ns()
            if loads:
                took = engine.load(range(pair * each, pair * each + each), asked.at_once)
            else:
                while time.monotonic_ns() - since < took * 1e9:
                    engine.hear()
            halves[loads] = engine.end(streams, since)
        alone, loaded = halves[False], halves[True]
        ratio = np.percentile(loaded, 99) / np.percentile(alone, 99)
        print(
            f"pair {pair + 1}: load {took:5.2f} s;  without {_told(alone)};  with {_told(loaded)};"
            f"  p99 x {ratio:.3f}",
            flush=True,
        )
        yield alone, loaded


def _told(gaps: np.ndarray) -> str:
    p50, p99 = np.percentile(gaps, (50, 99))
    return f"p50 {p50:6.2f} p99 {p99:6.2f} most {gaps.max():6.2f} ms ({len(gaps)})"


def options_of(asked: argparse.Namespace, folder: Path) -> EngineOptions:
    """For the engine."""
    return EngineOptions(
        model_folder=str(folder / "model"),
        dtype="float32" if asked.cpu else "bfloat16",
        device="cpu" if asked.cpu else "cuda",
        threads=1 if asked.cpu else 0,
        max_batch_size=asked.streams,
        max_batch_prefill_tokens=4096,
        max_total_tokens=asked.context + asked.new + 1,
        max_batch_total_tokens=asked.streams * (asked.context + asked.new) if asked.cpu else None,
        max_adapters=asked.slots,
        max_adapter_rank=asked.rank,
        max_loaded_adapters=asked.adapters + 1,
        adapter_folder=str(folder / "adapters"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--cpu", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dora", action="store_true", help="adapters with lengths of outputs")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="without loads, before the first")
    parser.add_argument("--at-once", type=int, default=1, help="loads that are asked for at a time")
    parser.add_argument("--turns", action="store_true", help="where turns spend their time")
    parser.add_argument("--folder", default=None, help="where files go; a temporary one if not set")
    asked = parser.parse_args()
    #: Tokens of a stream at most: a pair must end before its streams do.
    asked.new = 2000 if asked.cpu else 3500
    model = TINY if asked.cpu else LLAMA_8B
    model = model | {"max_position_embeddings": asked.context + asked.new + 1}
    folder = Path(tempfile.mkdtemp(dir=asked.folder))
    try:
        began = time.perf_counter()
        make_checkpoint(folder / "model", model)
        size = make_adapters(
            folder / "adapters", model, asked.adapters, asked.rank, dora=asked.dora
        )
        print(
            f"{asked.adapters} adapters of {size / 1e6:.1f} MB; files written in"
            f" {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        engine = Engine(options_of(asked, folder), turns=asked.turns)
        ready = engine.ready()
        print(
            f"engine ready after {ready.load_seconds:.0f} + {ready.warmup_seconds:.0f} s,"
            f" {ready.slots} KV slots",
            flush=True,
        )
        # Prompts are cached from here on.
        engine.end(engine.begin(asked.streams, asked.context, asked.new), 0)
        ratios = [
            float(np.percentile(loaded, 99) / np.percentile(alone, 99))
            for alone, loaded in measured(engine, asked)
        ]
        print(f"median of {len(ratios)} pairs: p99 x {statistics.median(ratios):.3f}  aim 1.10")
        engine.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
